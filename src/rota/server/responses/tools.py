"""The tools of /v1/responses become those of a chat: one level deeper."""

from __future__ import annotations

from typing import Any

from rota.core.errors import RequestError
from rota.server.responses.fields import ResponsesTool, ToolChoice


def chat_tools(tools: list[ResponsesTool]) -> list[dict[str, Any]]:
    """The functions as a chat has them. Raises RequestError for another tool."""
    return [_function(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def chat_choice(choice: str | ToolChoice) -> str | dict[str, Any]:
    """The choice as a chat has it."""
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        allowed = [{"type": tool.get("type"), "function": {"name": tool.get("name")}} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode or "auto", "tools": allowed}}
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
