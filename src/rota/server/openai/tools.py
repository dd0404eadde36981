"""Which tools a model may call, must call and is shown, and the grammar that keeps calls to their schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.texts import Tag, either, json_schema, tagged
from rota.server.calls.fields import Count, Fields, within
from rota.text.tools.formats import WRITTEN, Written, written_in

# ── tool fields ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The fields that let a model call tools, and think.

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Names of a switch of thoughts in chat templates: Qwen's and most others', and DeepSeek's.
_SWITCHES = ("enable_thinking", "thinking")


class Function(Fields):
    """A function that a model may call. `parameters` is the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool. Only functions are supported."""

    type: str = Field(json_schema_extra={"const": "function"})
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True)]


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    type: str = Field(json_schema_extra={"const": "function"})
    function: FunctionName


class AllowedTools(Fields):
    """Some of the tools, so that a list of tools that stays the same can be used in part."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1)]


class ToolChoice(Fields):
    """One function that must be called, or several that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ThinkingFields(Fields):
    """Whether the model thinks. `budget_tokens` is no limit here: thoughts count as output, within `max_tokens`."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = within(0)
    display: Literal["summarized"] | None = None


class ToolFields(Fields):
    """OpenAI's tools, and what other servers' clients send about thinking."""

    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # The older names of tools and tool_choice.
    functions: Annotated[list[Function], Field(fail_fast=True)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    # How long the model thinks, if its chat template asks for that.
    reasoning_effort: Effort | None = None
    # Whether the model thinks: as some templates name it, and as Anthropic's and other APIs do.
    enable_thinking: bool | None = None
    thinking: bool | ThinkingFields | None = None
    # Variables of the chat template, for example enable_thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field: false leaves the thoughts out of the answer.
    include_reasoning: bool | None = None
    # SGLang's field: false leaves the thoughts in the content, as the model wrote them.
    separate_reasoning: bool | None = None

    def thinking_wanted(self) -> dict[str, dict[str, Any]]:
        """For each field that says whether and how long to think: the variables of templates that say the same."""
        wanted: dict[str, dict[str, Any]] = {}
        if self.reasoning_effort is not None:
            off = dict.fromkeys(_SWITCHES, False) if self.reasoning_effort == "none" else {}
            wanted["reasoning_effort"] = {"reasoning_effort": self.reasoning_effort, **off}
        if self.enable_thinking is not None:
            wanted["enable_thinking"] = dict.fromkeys(_SWITCHES, self.enable_thinking)
        if (thinking := self.thinking) is not None:
            is_on = thinking if isinstance(thinking, bool) else {"enabled": True, "disabled": False}.get(thinking.type)
            wanted["thinking"] = {} if is_on is None else dict.fromkeys(_SWITCHES, is_on)
        return wanted

    def has_old_names(self) -> bool:
        """Whether the answer has one call, in OpenAI's older form."""
        if not self.functions:
            return False
        if self.tools:
            raise RequestError.bad_field("functions", "functions is the older name of tools; send one of them.")
        return True


# ── tool use ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Which tools a model may call, must call, and is shown.

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ALLOWED = "tool_choice.allowed_tools.tools"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Callable:
    """A function that may be called, and its place in the body."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request lets a model do with its tools."""

    # As chat templates render them.
    shown: tuple[dict[str, Any], ...] = ()
    callable: tuple[Callable, ...] = ()
    must_call: bool = False
    # Whether the client named the function that must be called.
    is_named: bool = False
    at_most: Literal[1] | None = None
    # Whether the answer has one call, in OpenAI's older form.
    is_old_form: bool = False
    param: str = "tools"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.callable)

    @property
    def is_free(self) -> bool:
        """Whether the model may write whatever it likes: nothing has to be kept by a grammar."""
        has_all = len(self.callable) == len(self.shown)
        return not self.must_call and self.at_most is None and has_all and not any(o.is_strict for o in self.callable)


def tool_use(fields: ToolFields) -> ToolUse:
    """What the fields ask for. Raises RequestError for the first one that is wrong."""
    is_old_form = fields.has_old_names()
    functions = list(_functions(fields))
    _check_names(functions)
    callable = tuple(_callable(place, function) for place, function in functions)
    mode, named, where = _choice(fields, is_old_form)
    if not functions and (mode == "required" or named):
        raise RequestError.bad_field(where, f"{where} asks for a call, but the request has no tools.")
    # What a model is not shown it does not call.
    if not functions or mode == "none":
        return ToolUse()
    is_named = bool(named) and where != _ALLOWED
    return ToolUse(
        shown=tuple(_shown(function) for _, function in functions),
        callable=_allowed(callable, named),
        must_call=mode == "required",
        is_named=is_named,
        at_most=1 if is_old_form or fields.parallel_tool_calls is False or is_named else None,
        is_old_form=is_old_form,
        param="functions" if is_old_form else "tools",
    )


def _functions(fields: ToolFields) -> Iterator[tuple[str, Function]]:
    """Each function with its place in the body."""
    for index, tool in enumerate(fields.tools or ()):
        if tool.type != "function":
            message = f"tools.{index} is of type '{tool.type[:100]}'; only 'function' is supported."
            raise RequestError.bad_field(f"tools.{index}.type", message)
        yield f"tools.{index}.function", tool.function
    for index, function in enumerate(fields.functions or ()):
        yield f"functions.{index}", function


def _check_names(functions: Sequence[tuple[str, Function]]) -> None:
    seen: dict[str, str] = {}
    for place, function in functions:
        check_name(function.name, f"{place}.name")
        if before := seen.get(function.name):
            message = f"{place}.name is '{function.name}', as {before}.name is; a name must be of one function."
            raise RequestError.bad_field(f"{place}.name", message)
        seen[function.name] = place


def check_name(name: str, param: str) -> None:
    """Raises RequestError for a name that calls cannot carry."""
    if not _NAME.fullmatch(name):
        message = f"{param} must have 1 to 64 characters, each a letter (a-z), a digit, '_' or '-'."
        raise RequestError.bad_field(param, message)


def _callable(place: str, function: Function) -> Callable:
    parameters = _NO_PARAMETERS if not function.parameters else function.parameters
    where = f"{place}.parameters"
    _check_schema(parameters, where)
    return Callable(name=function.name, parameters=parameters, is_strict=bool(function.strict), param=where)


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """Only what makes arguments an object. A grammar, if there is one, checks the rest."""
    if schema.get("type", "object") != "object":
        raise RequestError.bad_field(f"{where}.type", f"{where}.type must be 'object': arguments have names.")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise RequestError.bad_field(f"{where}.properties", f"{where}.properties must hold a schema for each name.")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise RequestError.bad_field(f"{where}.required", f"{where}.required must be a list of names.")


def _shown(function: Function) -> dict[str, Any]:
    """Templates expect parameters. That they are kept strictly is nothing for a model to read."""
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    return {"type": "function", "function": shown | {"parameters": function.parameters or _NO_PARAMETERS}}


def _choice(fields: ToolFields, is_old_form: bool) -> tuple[str, list[tuple[str, str]], str]:
    """The mode; the functions that are named, each with its place; and the field."""
    if is_old_form:
        called = fields.function_call
        if called is None or isinstance(called, str):
            return called or "auto", [], "function_call"
        return "required", [("function_call.name", called.name)], "function_call"
    choice = fields.tool_choice
    if isinstance(choice, ToolChoice):
        return _named_choice(choice)
    return choice or "auto", [], "tool_choice"


def _named_choice(choice: ToolChoice) -> tuple[str, list[tuple[str, str]], str]:
    if choice.type == "function":
        if choice.function is None:
            raise RequestError.bad_field("tool_choice.function", "tool_choice.function is missing.")
        return "required", [("tool_choice.function.name", choice.function.name)], "tool_choice"
    if (allowed := choice.allowed_tools) is None:
        raise RequestError.bad_field("tool_choice.allowed_tools", "tool_choice.allowed_tools is missing.")
    where = _ALLOWED
    return allowed.mode, [(f"{where}.{i}.function.name", t.function.name) for i, t in enumerate(allowed.tools)], where


def _allowed(callable: tuple[Callable, ...], named: list[tuple[str, str]]) -> tuple[Callable, ...]:
    known = {one.name for one in callable}
    for param, name in named:
        if name not in known:
            message = f"{param} is '{name[:100]}', which is no function of the request."
            raise RequestError.bad_field(param, message)
    wanted = {name for _, name in named} or known
    return tuple(one for one in callable if one.name in wanted)


# ── tool schemas ────────────────────────────────────────────────────────────────────────────────────────────────────
# The arguments of a call are those that its function names: an object of a tool's schema takes no others.

# An object with one of these says itself what else it takes, or shares its properties with another schema.
_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
_BY_NAME = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema without properties that it does not name. JSON Schema would take any, and models make them up."""
    return dict(schema) if _has_shared_parts(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _BY_NAME:
        if isinstance(inner := schema.get(name), dict):
            found[name] = {key: _closed(one) for key, one in inner.items()}
    for name in _LISTED:
        if isinstance(inner := schema.get(name), list):
            found[name] = [_closed(one) for one in inner]
    if isinstance(schema.get("items"), dict):
        found["items"] = _closed(schema["items"])
    if "properties" in schema and _OPEN.isdisjoint(schema):
        found["additionalProperties"] = False
    return found


def _has_shared_parts(value: Any) -> bool:
    """Whether parts of the schema hold together: then none of them knows all properties."""
    if isinstance(value, dict):
        return "allOf" in value or any(map(_has_shared_parts, value.values()))
    return isinstance(value, list) and any(map(_has_shared_parts, value))


# ── tool grammar ────────────────────────────────────────────────────────────────────────────────────────────────────
# Calls that must be made, or must match their schema, are kept by a grammar.


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
