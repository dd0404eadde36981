"""The response bodies of /v1/messages, for /docs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rota.server.rota_body import RotaBody


class MessageUsageBody(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    rota: RotaBody | None = None


class MessageBody(BaseModel):
    """The next message of a conversation, as blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsageBody


class MessageEventBody(BaseModel):
    """How a message grows. The kind of an event says which other fields it has."""

    type: str


class TokenCountBody(BaseModel):
    """The length of a prompt."""

    input_tokens: int
