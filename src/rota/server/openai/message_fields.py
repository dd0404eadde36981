"""The messages of a conversation, as clients send them and as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic_core import from_json

from rota.core.errors import RequestError
from rota.server.fields import Fields, Unsupported
from rota.server.openai.tool_use import check_name


class ContentPart(Fields):
    """A part of a message. Only parts of type 'text' are supported."""

    # A part of another type has other fields. It is refused for its type, not for its fields.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"const": "text"})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})


class CalledFunction(Fields):
    """A function and its arguments, which are a JSON object, usually as a text."""

    name: str
    arguments: str | dict[str, Any] = ""
    # The `openai` package adds what it read of a text, and sends it back. The text says the same.
    parsed_arguments: Any = None

    def for_template(self, where: str) -> dict[str, Any]:
        check_name(self.name, f"{where}.name")
        return {"name": self.name, "arguments": self._arguments(f"{where}.arguments")}

    def _arguments(self, where: str) -> dict[str, Any]:
        if not isinstance(self.arguments, str):
            return self.arguments
        try:
            arguments = from_json(self.arguments or "{}", allow_inf_nan=False)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError.bad_field(where, f"{where} must be the text of a JSON object.")
        return arguments


class MessageCall(Fields):
    """A call that the model made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams number their calls, and some clients send the numbers back

    def for_template(self, where: str) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template(f"{where}.function")}


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # The older form of a call. Its result has the role 'function'.
    function_call: CalledFunction | None = None
    # What the model thought before. Templates that know it decide whether it is read again.
    reasoning_content: str | None = None
    reasoning: str | None = None
    type: Literal["text"] | None = None
    parsed: Any = None  # as parsed_arguments
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it. `where` names the message in an error."""
        self.refuse_unsupported(f"{where}.")
        calls = self._calls(where)
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": self._text(where, bool(calls))}
        said = self.reasoning_content if self.reasoning is None else self.reasoning
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": said}
        if self.role == "function":
            others["tool_call_id"] = self.name
        if calls:
            message["tool_calls"] = calls
        return message | {name: value for name, value in others.items() if value is not None}

    def _calls(self, where: str) -> list[dict[str, Any]]:
        calls = [one.for_template(f"{where}.tool_calls.{index}") for index, one in enumerate(self.tool_calls or ())]
        if self.function_call:
            called = self.function_call.for_template(f"{where}.function_call")
            calls.append({"id": called["name"], "type": "function", "function": called})
        if calls and self.role != "assistant":
            param = f"{where}.tool_calls" if self.tool_calls else f"{where}.function_call"
            raise RequestError.bad_field(param, f"{param} belongs to messages of the assistant.")
        return calls

    def _text(self, where: str, has_calls: bool) -> str:
        if self.content is None:
            if not has_calls:
                message = f"{where}.content is missing; only a message with tool_calls may have none."
                raise RequestError.bad_field(f"{where}.content", message)
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(_part_text(part, f"{where}.content.{index}") for index, part in enumerate(self.content))


# 'developer' is the newer name of a role, 'function' the older one of another; templates do not know them.
_ROLES = {"developer": "system", "function": "tool"}

Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates expect them. Raises RequestError for a result without its call."""
    called: dict[str, str] = {}
    turns = []
    for index, message in enumerate(messages):
        turn = message.for_template(f"messages.{index}")
        called |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
        if turn["role"] == "tool":
            # Some templates read the name, and clients need not send it.
            turn.setdefault("name", called[_answered(message, turn, called, f"messages.{index}")])
        turns.append(turn)
    return turns


def _answered(message: Message, turn: dict[str, Any], called: dict[str, str], where: str) -> str:
    """The id of the call that a result answers."""
    param = f"{where}.{'name' if message.role == 'function' else 'tool_call_id'}"
    call_id = turn.get("tool_call_id")
    if call_id is None:
        raise RequestError.bad_field(param, f"{param} is missing: it says which call the result is of.")
    if call_id not in called:
        given = call_id[:100]
        raise RequestError.bad_field(param, f"{param} is '{given}', but no message before it makes that call.")
    return str(call_id)


def _part_text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        message = f"{where} is of type '{part.type[:100]}'; only 'text' is supported."
        raise RequestError.bad_field(f"{where}.type", message)
    if part.text is None:
        raise RequestError.bad_field(f"{where}.text", f"{where}.text is missing.")
    return part.text
