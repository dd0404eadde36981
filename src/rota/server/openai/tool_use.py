"""Which tools a model may call, must call, and is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rota.core.errors import RequestError
from rota.server.openai.tool_fields import Function, ToolChoice, ToolFields

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


NO_TOOLS = ToolUse()


def tool_use(fields: ToolFields) -> ToolUse:
    """What the fields ask for. Raises RequestError for the first one that is wrong."""
    is_old_form = fields.has_old_names()
    functions = list(_functions(fields))
    _check_names(functions)
    callable = tuple(_callable(place, function) for place, function in functions)
    mode, named, where = _choice(fields, is_old_form)
    if not functions:
        if mode == "required" or named:
            raise RequestError.bad_field(where, f"{where} asks for a call, but the request has no tools.")
        return NO_TOOLS
    is_named = bool(named) and where != _ALLOWED
    # What a model is not shown it does not call.
    if mode == "none":
        return NO_TOOLS
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
