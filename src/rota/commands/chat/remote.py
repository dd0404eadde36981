"""A remote server is asked over HTTP, and its answer read as it comes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, ClassVar

from rota.core.errors import RotaError

# A server that is alive answers such a question at once.
LOOK_S = 10.0
# A stream has a sign of life every few seconds.
STREAM_S = 300.0
LONGEST_SENTENCE = 500


class ChatError(RotaError):
    """A server cannot be asked, or refuses to answer."""

    exit_code: ClassVar[int] = 1


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
        """The base model's name, then its adapters. Raises ChatError if the server does not answer."""
        with self._open("/v1/models", None, LOOK_S) as response:
            try:
                return [str(model["id"]) for model in json.load(response)["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ChatError(f"What answers at {self.url} is no server with OpenAI's routes.") from error

    def answer(self, model: str, messages: Sequence[dict[str, str]], options: dict[str, Any]) -> Generator[Piece]:
        """The answer to a conversation as it comes. Raises ChatError; closing the generator ends the answer."""
        # No field that only some servers know.
        usage = {"include_usage": True}
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": usage, **options}
        with self._open("/v1/chat/completions", body, STREAM_S) as response:
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield _piece(data)

    @contextmanager
    def _open(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> Iterator[HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            # Other clients of OpenAI's routes are given the address with /v1.
            root = self.url.rstrip("/").removesuffix("/v1")
            request = urllib.request.Request(root + path, data, headers)
            with _opener(request.host).open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise ChatError(_sentence_of(error.read()) or f"The server answers with status {error.code}.") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ChatError(f"The server at {self.url} cannot be reached, or has gone: {reason}.") from None


def _opener(host: str) -> urllib.request.OpenerDirector:
    """A server on this machine is not asked through a proxy."""
    is_near = host.partition(":")[0] in ("127.0.0.1", "localhost", "[")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_near else []))


def _piece(data: bytes) -> Piece:
    try:
        event = json.loads(data)
    except ValueError:
        raise ChatError("The server sent something that is not JSON.") from None
    if "error" in event:
        raise ChatError(_sentence_of(data) or "The answer failed.")
    delta = (event.get("choices") or [{}])[0].get("delta") or {}
    tokens = (event.get("usage") or {}).get("completion_tokens")
    return Piece(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "", tokens)


def _sentence_of(body: bytes) -> str:
    """The sentence in an error's body: OpenAI's shape, or any other with a message."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        return ""
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail")
    return str(found or "")[:LONGEST_SENTENCE]
