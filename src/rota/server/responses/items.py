"""The input of /v1/responses: messages, calls, their outputs and thoughts, as items of one list."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from rota.core.errors import RequestError
from rota.server.fields import Fields, Unsupported

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Fields):
    """A part of a message. Parts that are no text are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"required": ["type", "text"]})

    type: str = Field(json_schema_extra={"enum": ["input_text", "output_text", "reasoning_text", "summary_text"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})

    def checked(self, where: str) -> dict[str, str]:
        """The part as a chat has it."""
        if self.type not in ("input_text", "output_text", "reasoning_text", "summary_text", "text"):
            message = f"{where} is of type '{self.type[:100]}'; Rota reads text, in parts of type 'input_text'."
            raise RequestError.bad_field(f"{where}.type", message)
        if self.text is None:
            raise RequestError.bad_field(f"{where}.text", f"{where}.text is missing.")
        return {"type": "text", "text": self.text}


Parts = Annotated[list[TextPart], Field(fail_fast=True)]


def content_of(content: str | list[TextPart], where: str) -> str | list[dict[str, str]]:
    """A text, or parts as a chat has them."""
    if isinstance(content, str):
        return content
    return [part.checked(f"{where}.{index}") for index, part in enumerate(content)]


class MessageItem(Fields):
    """A message, also one that was an answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    # Notes of the service that made it. They change nothing.
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Fields):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class OutputItem(Fields):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    name: str | None = None
    id: str | None = None
    status: Status | None = None
    namespace: Unsupported = None
    caller: Unsupported = None


class ReasoningItem(Fields):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: Unsupported = None

    def text(self, where: str) -> str:
        self.refuse_unsupported(f"{where}.")
        name, parts = ("content", self.content) if self.content else ("summary", self.summary or [])
        return "\n".join(part.checked(f"{where}.{name}.{index}")["text"] for index, part in enumerate(parts))


class OtherItem(Fields):
    """An item that is refused by its type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str | None = None


_KINDS = {
    "message": "Message",
    "function_call": "Call",
    "function_call_output": "Output",
    "reasoning": "Reasoning",
}


def _kind(item: Any) -> str:
    # Capital letters: `fields` leaves the names of types out of the path of an error.
    if not isinstance(item, dict):
        return "Other"
    return _KINDS.get(str(item.get("type") or ("message" if "role" in item else "")), "Other")


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[OutputItem, Tag("Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(fail_fast=True)]


def refused(item: OtherItem, where: str) -> RequestError:
    """The error for an item of another type."""
    kind = f"of type '{item.type[:100]}'" if item.type else "without a type"
    message = f"{where} is an item {kind}; Rota reads messages, function_call, function_call_output and reasoning."
    return RequestError.bad_field(f"{where}.type", message)
