"""The items of /v1/responses become the messages of a chat."""

from __future__ import annotations

from typing import Any

from rota.core.errors import RequestError
from rota.server.responses.items import (
    CallItem,
    MessageItem,
    OtherItem,
    OutputItem,
    ReasoningItem,
    content_of,
    refused,
)

Items = list[MessageItem | CallItem | OutputItem | ReasoningItem | OtherItem]


class Conversation:
    """Messages, and for each the place of its first item. Thoughts and calls of one turn are one message."""

    def __init__(self, instructions: str | None, given: str | Items) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {"messages": "input"}
        if instructions:
            self._add({"role": "system", "content": instructions}, "instructions")
        if isinstance(given, str):
            self._add({"role": "user", "content": given}, "input")
            return
        if not given:
            raise RequestError.bad_field("input", "input is an empty list; send a text or at least one item.")
        for index, item in enumerate(given):
            self._take(item, f"input.{index}")
        for message in self.messages:
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""  # thoughts without an answer

    def _take(self, item: MessageItem | CallItem | OutputItem | ReasoningItem | OtherItem, where: str) -> None:
        match item:
            case MessageItem():
                self._message(item, where)
            case CallItem():
                item.refuse_unsupported(f"{where}.")
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                calls = self._turn(where).setdefault("tool_calls", [])
                self.places[f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}.function"] = where
                calls.append(call)
            case OutputItem():
                item.refuse_unsupported(f"{where}.")
                content = content_of(item.output, f"{where}.output")
                self.places[f"messages.{len(self.messages)}.tool_call_id"] = f"{where}.call_id"
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": content}, where)
            case ReasoningItem():
                if text := item.text(where):
                    self._add({"role": "assistant", "content": None, "reasoning_content": text}, where)
            case OtherItem():
                raise refused(item, where)

    def _message(self, item: MessageItem, where: str) -> None:
        content = content_of(item.content, f"{where}.content")
        if item.role == "assistant" and self._is_open_turn and self.messages[-1]["content"] is None:
            self.messages[-1]["content"] = content
        else:
            self._add({"role": item.role, "content": content}, where)

    @property
    def _is_open_turn(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _turn(self, where: str) -> dict[str, Any]:
        """The message of the model's turn that goes on, or a new one."""
        if not self._is_open_turn:
            self._add({"role": "assistant", "content": None}, where)
        return self.messages[-1]

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.places[f"messages.{len(self.messages)}"] = where
        self.messages.append(message)
