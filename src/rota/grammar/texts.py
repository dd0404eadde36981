"""What a client asks of an answer becomes a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.gbnf import GbnfError, as_lark, is_gbnf
from rota.grammar.lark import ANY_TEXT, marker, quoted, spelled
from rota.grammar.schemas import MAX_LITERAL, library_schema
from rota.grammar.tags import Tag, tagged
from rota.grammar.written import MAX_PATTERN, check_size, grammar_of, lark, written

__all__ = ["Tag", "after_thinking", "choice", "ebnf", "either", "json_object", "json_schema", "regex", "tagged"]


def json_schema(schema: Mapping[str, Any] | bool, param: str) -> Grammar:
    """JSON that meets a schema. Raises RequestError with the place of a keyword that cannot be kept."""
    return grammar_of({"json_schema": library_schema(schema, param)}, param)


def json_object(param: str) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> Grammar:
    """A text that matches a regular expression from its beginning to its end."""
    check_size(pattern, param, MAX_PATTERN)
    return lark(f"start: /{_within_slashes(pattern)}/" if pattern else 'start: ""', param)


def choice(options: Sequence[str], param: str) -> Grammar:
    """One of several texts."""
    if not options:
        raise RequestError.bad_field(param, f"{param} is empty; give at least one text to choose from.")
    if any(len(option) > MAX_LITERAL for option in options):
        raise RequestError.bad_field(param, f"{param} holds a text of more than {MAX_LITERAL:,} characters.")
    return lark(f"start: OPTION\nOPTION: {' | '.join(map(quoted, options))}", param)


def ebnf(text: str, param: str) -> Grammar:
    """A text of a context-free grammar: GBNF, which begins at `root`, or Lark, which begins at `start`."""
    check_size(text, param, MAX_PATTERN)
    try:
        return lark(as_lark(text) if is_gbnf(text) else text, param)
    except GbnfError as error:
        raise RequestError.bad_field(param, f"{param} is not GBNF: {error}.") from None


def either(one: Grammar, other: Grammar) -> Grammar:
    """An answer that matches one of two grammars."""
    head = {"name": "either", "lark_grammar": "start: @one | @other"}
    parts = _named(one, "one")
    others = _renamed(_named(other, "other"), {part["name"] for part in parts})
    return replace(one, text=written([head, *parts, *others], one.param))


def after_thinking(grammar: Grammar, end: str, specials: Mapping[str, int] | None = None, start: str = "") -> Grammar:
    """Any text up to `end`, then the grammar. With a `start`, only an answer that begins with it has such a text.

    `specials`: the ids of special tokens that `start` and `end` may hold, by name.
    """
    known = specials or {}
    thoughts = f"({spelled(start, known)} thought blanks?)?" if start else "thought blanks?"
    begins = "\n".join(
        (
            f"start: {thoughts} @answer",
            *marker("thought", end, known),
            "blanks: /[ \\n]{1,4}/",
            ANY_TEXT,
        )
    )
    parts = [{"name": "thinking", "lark_grammar": begins}, *_named(grammar, "answer")]
    return replace(grammar, text=written(parts, grammar.param))


def _named(grammar: Grammar, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, to be parts of another one that calls it by this name."""
    head, *others = json.loads(grammar.text)["grammars"]
    return [{**head, "name": name}, *others]


def _renamed(parts: list[dict[str, Any]], taken: Set[str]) -> list[dict[str, Any]]:
    """The same parts, in which a name that is taken is another one."""
    names = [part["name"] for part in parts if part["name"] in taken]
    if not names:
        return parts
    used = re.compile(rf"@({'|'.join(map(re.escape, names))})\b")
    return [
        {
            **part,
            "name": f"other_{part['name']}" if part["name"] in taken else part["name"],
            **({"lark_grammar": used.sub(r"@other_\1", part["lark_grammar"])} if "lark_grammar" in part else {}),
        }
        for part in parts
    ]


def _within_slashes(pattern: str) -> str:
    """A slash would end the pattern in Lark, and so would the end of a line."""
    escaped, is_escaped = [], False
    for character in pattern:
        if character == "/" and not is_escaped:
            escaped.append("\\")
        if character == "\n":
            escaped.append("n" if is_escaped else "\\n")
        else:
            escaped.append(character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(escaped)
