"""The tools of /v1/responses become those of a chat: one level deeper."""

from __future__ import annotations

from typing import Any

from rota.core.errors import RequestError
from rota.server.responses.fields import ResponsesTool, ToolChoice


def chat_tools(tools: list[ResponsesTool], choice: str | ToolChoice | None) -> list[tuple[int, dict[str, Any]]]:
    """The functions as a chat has them, each with its place in the body. Of `allowed_tools`, only those are shown."""
    allowed = _allowed(choice, [tool.name for tool in tools])
    found = [(place, _function(tool, f"tools.{place}")) for place, tool in enumerate(tools)]
    return [(place, tool) for place, tool in found if allowed is None or tool["function"]["name"] in allowed]


def chat_choice(choice: str | ToolChoice) -> str | dict[str, Any]:
    """The choice as a chat has it."""
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        return choice.mode or "auto"
    if choice.type != "function":
        message = f"tool_choice is of type '{choice.type[:100]}'; Rota calls functions: use 'function'."
        raise RequestError.bad_field("tool_choice.type", message)
    return {"type": "function", "function": {"name": choice.name}}


def _function(tool: ResponsesTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        message = (
            f"{where} is the built-in tool '{tool.type[:100]}'; Rota has none: it calls functions that the client runs."
        )
        raise RequestError.bad_field(f"{where}.type", message)
    if tool.model_extra:
        name = next(iter(tool.model_extra))[:100]
        raise RequestError.bad_field(f"{where}.{name}", f"'{where}.{name}' is not a field of a function.")
    if tool.name is None:
        raise RequestError.bad_field(f"{where}.name", f"{where}.name is missing.")
    return {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}


def _allowed(choice: str | ToolChoice | None, known: list[str | None]) -> set[str] | None:
    if not isinstance(choice, ToolChoice) or choice.type != "allowed_tools":
        return None
    allowed = set()
    for index, tool in enumerate(choice.tools or []):
        if tool.get("type") != "function" or tool.get("name") not in known:
            place = f"tool_choice.tools.{index}"
            raise RequestError.bad_field(place, f"{place} names no function of tools.")
        allowed.add(tool["name"])
    return allowed
