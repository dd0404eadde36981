"""Calls that must be made, or must match their schema, are kept by a grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.texts import Tag, either, json_schema, tagged
from rota.server.openai.tool_schemas import closed
from rota.server.openai.tool_use import Callable, ToolUse
from rota.text.tools.written import WRITTEN, Written, written_in


def form_of_calls(use: ToolUse, form: str, wanted: Grammar | None) -> str:
    """The format in which calls are read; empty if there are none. Raises RequestError if they cannot be read or kept.

    `form` is the model's own; empty if the server reads none.
    """
    if not use.callable:
        return ""
    if not form:
        message = f"Rota does not read calls of this model (--tool-call-parser none); leave out {use.param}."
        raise RequestError.bad_field(use.param, message)
    if form in WRITTEN or (use.is_free and wanted is None):
        return form
    if use.must_call:
        return "json"  # Python's arguments cannot be kept to a schema
    message = (
        f"{use.param} must be called freely: the calls of this model are written as Python, which no grammar keeps. "
        "Leave out strict, response_format and parallel_tool_calls, or use tool_choice 'required'."
    )
    raise RequestError.bad_field(use.param, message)


def tool_grammar(use: ToolUse, form: str, wanted: Grammar | None, specials: Mapping[str, int]) -> Grammar | None:
    """The grammar of the whole answer. `wanted` is that of an answer without calls. None: everything is allowed.

    `specials`: the ids of special tokens that may stand in a call, by name.
    """
    if not use.callable or (use.is_free and wanted is None):
        return wanted
    written = written_in(form, specials.keys())
    is_bare = use.must_call or wanted is not None
    with _naming_the_function(use):
        calls = tagged(
            [_tag(one, written, use.must_call) for one in use.callable],
            use.param,
            at_least=1 if is_bare else 0,
            at_most=use.at_most,
            text_between=not is_bare,
            specials=specials,
        )
    return calls if wanted is None or use.must_call else either(calls, wanted)


@contextmanager
def _naming_the_function(use: ToolUse) -> Iterator[None]:
    """An error in one of the schemas is raised with its place in the body."""
    try:
        yield
    except RequestError:
        for one in use.callable:
            if use.must_call or one.is_strict:
                json_schema(closed(one.parameters), one.param)
        raise


def _tag(one: Callable, written: Written, is_forced: bool) -> Tag:
    """A call of one function. Its arguments are any object, unless more was asked for."""
    return Tag(
        begin=f"{written.begin}{one.name}{written.middle}",
        schema=closed(one.parameters) if is_forced or one.is_strict else {"type": "object"},
        end=written.end,
        trigger=written.trigger,
    )
