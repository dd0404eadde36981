"""The fields that say what an answer must look like: a schema, a pattern, a choice or a grammar."""

from __future__ import annotations

from typing import Literal

from rota.server.fields import Fields


class ResponseFormat(Fields):
    type: Literal["text"]


class StructuredFields(Fields):
    """OpenAI's response_format, and the fields that other servers' clients send for the same."""

    response_format: ResponseFormat | None = None
