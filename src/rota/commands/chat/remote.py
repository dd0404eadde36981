"""A remote server is asked over HTTP, and its answer read as it comes."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any

from rota.commands.server_call import LOOK_S, CallError, call, sentence_of

# A stream has a sign of life every few seconds.
STREAM_S = 300.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. `tokens` counts all tokens of the answer so far, if the server tells."""

    text: str = ""
    thought: str = ""
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Remote:
    """A server with OpenAI's routes."""

    url: str
    api_key: str | None = None

    def models(self) -> list[str]:
        """The base model's name, then its adapters. Raises CallError if the server does not answer."""
        with self._call("/v1/models", None, LOOK_S) as response:
            try:
                return [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise CallError(f"What answers at {self.url} is no server with OpenAI's routes.") from error

    def answer(self, model: str, messages: Sequence[dict[str, str]], options: dict[str, Any]) -> Generator[Piece]:
        """The answer to a conversation as it comes. Raises CallError; closing the generator ends the answer."""
        # No field that only some servers know.
        usage = {"include_usage": True}
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": usage, **options}
        with self._call("/v1/chat/completions", body, STREAM_S) as response:
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield _piece(data)

    def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> AbstractContextManager[HTTPResponse]:
        return call(self.url, self.api_key, path, body, timeout_s)


def _piece(data: bytes) -> Piece:
    try:
        event = json.loads(data)
    except ValueError:
        raise CallError("The server sent something that is not JSON.") from None
    if "error" in event:
        raise CallError(sentence_of(data) or "The answer failed.")
    delta = (event.get("choices") or [{}])[0].get("delta") or {}
    tokens = (event.get("usage") or {}).get("completion_tokens")
    return Piece(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "", tokens)
