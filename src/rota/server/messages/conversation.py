"""Messages in Anthropic's shape become the messages of a chat."""

from __future__ import annotations

from typing import Any

import msgspec

from rota.core.errors import RequestError
from rota.server.messages.content import (
    OtherBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_parts,
)
from rota.server.messages.fields import MessageFields, PromptFields


class Conversation:
    """Messages, and for each the client's message that it comes from. A result of a call is a message of its own."""

    def __init__(self, fields: PromptFields) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        if fields.system:
            self._add({"role": "system", "content": text_parts(fields.system, "system")}, "system")
        for index, message in enumerate(fields.messages):
            where = f"messages.{index}"
            if not message.content:
                content = f"{where}.content"
                raise RequestError.bad_field(content, f"{content} is empty; send a text or at least one block.")
            if isinstance(message.content, str):
                self._add({"role": message.role, "content": message.content}, where)
            elif message.role == "assistant":
                self._turn(message, where)
            else:
                self._user(message, where)

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer, as in Anthropic's own service."""
        last = self.messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def _user(self, message: MessageFields, where: str) -> None:
        texts: list[dict[str, str]] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content.{index}"
            match block:
                case TextBlock():
                    texts.append(block.part(place))
                case ToolResultBlock():
                    texts = self._flush(message.role, texts, where)
                    self.places[f"messages.{len(self.messages)}.tool_call_id"] = f"{place}.tool_use_id"
                    result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text(place)}
                    self._add(result, place)
                case OtherBlock():
                    raise block.refusal(place)
                case _:
                    raise _misplaced(block, place, message.role)
        self._flush(message.role, texts, where)

    def _turn(self, message: MessageFields, where: str) -> None:
        """The model's turn: thoughts, text and calls are one message."""
        texts: list[dict[str, str]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for index, block in enumerate(message.content):
            place = f"{where}.content.{index}"
            match block:
                case TextBlock():
                    texts.append(block.part(place))
                case ToolUseBlock():
                    self.places[f"messages.{len(self.messages)}.tool_calls.{len(calls)}.function"] = place
                    calls.append(_call(block))
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case OtherBlock():
                    raise block.refusal(place)
                case _:
                    raise _misplaced(block, place, message.role)
        turn: dict[str, Any] = {"role": "assistant", "content": texts or (None if calls else "")}
        turn |= {"tool_calls": calls} if calls else {}
        self._add(turn | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}), where)

    def _flush(self, role: str, texts: list[dict[str, str]], where: str) -> list[dict[str, str]]:
        if texts:
            self._add({"role": role, "content": texts}, where)
        return []

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.places[f"messages.{len(self.messages)}"] = where
        self.messages.append(message)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _misplaced(block: Any, where: str, role: str) -> RequestError:
    message = f"{where} is of type '{block.type}', which a message of role '{role}' cannot hold."
    return RequestError.bad_field(f"{where}.type", message)
