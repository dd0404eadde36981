"""Asking is one request over HTTP, from its first byte to the end of its stream or the moment its client leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from rota.bench.backends import ENDINGS, Backend, Usage
from rota.bench.sse import DONE, EventReader
from rota.core.events import Finished, FinishReason
from rota.core.ids import RequestId
from rota.observe.summary import Record

LONGEST_REASON = 200  # characters of a server's complaint that are kept


class AnswerFailed(Exception):
    """The answer is not what was asked for; the message says why."""


@dataclass(slots=True)
class Measured:
    """What has come of one answer so far; its tokens' times go into the record."""

    record: Record
    ending: str | None = None
    usage: Usage = field(default_factory=Usage)
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
        # An answer that ends without a word has a first token all the same.
        if piece.is_news_after(self.usage) or (self.ending and not self.record.tokens):
            self.record.note_token(at)
        if piece.usage is not None:
            self.usage = piece.usage

    def check(self) -> FinishReason:
        """How a stream that is over has ended; half an answer is none."""
        if self.ending is None or not self.is_done:
            raise AnswerFailed("the stream broke off before its end")
        if self.ending not in ENDINGS:
            raise AnswerFailed(f"the answer ended by '{self.ending}'")
        return FinishReason(self.ending)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended, and what was wrong with it if it failed."""

    finished: Finished
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is being asked."""

    session: aiohttp.ClientSession
    url: str
    backend: Backend

    async def ask(
        self, request_id: RequestId, body: bytes, record: Record, leaves_after_s: float | None = None
    ) -> Outcome:
        """Send a body and follow its answer, for so long at most; what goes wrong is in what is returned."""
        answer, problem = Measured(record), ""
        try:
            async with asyncio.timeout(leaves_after_s) as patience:
                reason = await self._follow(body, answer)
        except (AnswerFailed, aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and patience.expired():
                reason = FinishReason.ABORT
            else:
                reason, problem = FinishReason.FAILED, _explain(error)
        usage, ended_at = answer.usage, time.monotonic()
        return Outcome(
            Finished(
                request_id=request_id,
                at=ended_at,
                reason=reason,
                prompt_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
            ),
            problem,
        )

    async def tell(self, path: str, fields: dict[str, Any]) -> None:
        """Post something that has no stream for an answer; raises AnswerFailed if the server refuses."""
        try:
            async with self.session.post(self.url + path, json=fields) as response:
                if response.status != 200:
                    raise AnswerFailed(f"{path}: status {response.status}: {message_of(await response.text())}")
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerFailed(f"{path}: {_explain(error)}") from error

    async def _follow(self, body: bytes, answer: Measured) -> FinishReason:
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
    """The sentence in an error's body, in OpenAI's shape or any other."""
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
