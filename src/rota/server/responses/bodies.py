"""The response bodies of /v1/responses, for /docs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rota.server.rota_body import RotaBody


class ResponseUsageBody(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    rota: RotaBody | None = None


class ResponseBody(BaseModel):
    """The next turn of a conversation, as items."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponseUsageBody | None


class ResponseEventBody(BaseModel):
    """How a response grows. The kind of an event says which other fields it has."""

    type: str
    sequence_number: int
