"""The client sends one request over HTTP and follows its stream until it ends or the client leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rota.bench.backends import ENDINGS, Backend, UsageFields
from rota.core.errors import ConfigError
from rota.core.events import Finished, FinishReason
from rota.core.ids import RequestId
from rota.observe.summary import RequestRecord

# ── sse ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Server-sent events are read as the bytes come: the text after `data:` in every complete line.

DONE = b"[DONE]"


class EventReader:
    """Bytes in, payloads out. Comments are dropped: servers send them to keep a quiet connection alive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


LONGEST_REASON = 200  # characters of a server's error that are kept


class AnswerFailed(Exception):
    """The answer is not usable. The message says why."""


@dataclass(slots=True)
class AnswerProgress:
    """One answer so far."""

    moments: list[float] = field(default_factory=list)  # when its tokens came
    ending: str | None = None
    usage: UsageFields = field(default_factory=UsageFields)
    is_done: bool = False

    def note(self, payload: bytes, backend: Backend, at: float) -> None:
        if payload == DONE:
            self.is_done = True
            return
        try:
            piece = backend.read(payload)
        except msgspec.DecodeError as error:
            raise AnswerFailed(f"an event that cannot be read: {error}") from None
        if piece.error is not None:
            raise AnswerFailed(message_of(piece.error))
        self.ending = piece.ending or self.ending
        # An answer that ends without text has a first token all the same.
        if piece.has_token_after(self.usage) or (self.ending and not self.moments):
            self.moments.append(at)
        if piece.usage is not None:
            self.usage = piece.usage

    def check(self) -> FinishReason:
        """Why a finished stream ended. Raises AnswerFailed for half an answer."""
        if self.ending is None or not self.is_done:
            raise AnswerFailed("the stream broke off before its end")
        if self.ending not in ENDINGS:
            raise AnswerFailed(f"the answer ended by '{self.ending}'")
        return FinishReason(self.ending)


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test."""

    session: aiohttp.ClientSession
    url: str
    backend: Backend

    async def ask(
        self, request_id: RequestId, body: bytes, record: RequestRecord, leaves_after_s: float | None = None
    ) -> tuple[Finished, str]:
        """Send a body and follow its answer for at most `leaves_after_s`; gives its end, and what went wrong."""
        answer, problem = AnswerProgress(), ""
        try:
            async with asyncio.timeout(leaves_after_s) as deadline:
                reason = await self._follow(body, answer)
        except (AnswerFailed, aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                reason = FinishReason.ABORT
            else:
                reason, problem = FinishReason.FAILED, _explain(error)
        usage, ended_at = answer.usage, time.monotonic()
        if answer.moments:
            record.note_tokens(np.asarray(answer.moments))
        finished = Finished(
            request_id=request_id,
            at=ended_at,
            reason=reason,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )
        return finished, problem

    async def tell(self, path: str, fields: dict[str, Any]) -> None:
        """Post a message whose answer is no stream. Raises AnswerFailed if the server refuses."""
        try:
            async with self.session.post(self.url + path, json=fields) as response:
                if response.status != 200:
                    raise AnswerFailed(f"{path}: status {response.status}: {message_of(await response.text())}")
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerFailed(f"{path}: {_explain(error)}") from error

    async def _follow(self, body: bytes, answer: AnswerProgress) -> FinishReason:
        async with self.session.post(self.url + self.backend.path, data=body) as response:
            if response.status != 200:
                raise AnswerFailed(f"status {response.status}: {message_of(await response.text())}")
            events = EventReader()
            async for data in response.content.iter_any():
                at = time.monotonic()
                for payload in events.feed(data):
                    answer.note(payload, self.backend, at)
        return answer.check()


def message_of(error: Any) -> str:
    """The sentence in an error's body, in OpenAI's shape or another."""
    if isinstance(error, str):
        try:
            error = msgspec.json.decode(error)
        except msgspec.DecodeError:
            return str(error)[:LONGEST_REASON]
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("error_message") or error.get("detail") or "?"
    return str(error)[:LONGEST_REASON]


def _explain(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came for too long"
    return str(error) or type(error).__name__


# ── server list ─────────────────────────────────────────────────────────────────────────────────────────────────────
# A server lists what it serves: the base model and its adapters.


@dataclass(frozen=True, slots=True)
class ServerList:
    """The base model's name, and the path of every adapter by name, in the server's order."""

    base: str
    paths: dict[str, str]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def path_of(self, adapter: str) -> str:
        if adapter not in self.paths:
            raise ConfigError(f"The server does not list {adapter}, so a transient cannot be loaded from its folder.")
        return self.paths[adapter]


async def list_models(server: Server, base: str | None) -> ServerList:
    """Read /v1/models. Raises ConfigError if there is no usable answer."""
    try:
        async with server.session.get(f"{server.url}/v1/models") as response:
            text = await response.text()
            if response.status != 200:
                raise ConfigError(f"{server.url}/v1/models answers {response.status}: {message_of(text)}")
            entries: list[dict[str, Any]] = (await response.json())["data"]
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"There is no answer at {server.url}/v1/models: {error}.") from error
    names = [entry["id"] for entry in entries if not entry.get("parent")]
    if base is None and not names:
        raise ConfigError(f"{server.url} lists no base model; name one with --model.")
    paths = {entry["id"]: str(entry.get("root") or "") for entry in entries if entry.get("parent")}
    return ServerList(base or names[0], paths)
