"""A call is what a program waits for: the engine's thread brings its news, and the caller's thread makes text of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rota.core.errors import EngineDiedError, FaultCode, RequestError, RotaError
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Event,
    Finished,
    FinishReason,
    Produced,
    PromptsScored,
)
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, Message
from rota.core.plan import TokenLogprobs
from rota.core.request import Request
from rota.observe.request_log import log_engines
from rota.text.stream import TextStream
from rota.text.vectors import normalised

CLOSED = "This LLM is closed; make another one."

# ── completion ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A completion grows token by token until its request ends.


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    # One per token, if the parameters asked for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    # One per token of the prompt, from its second token on, if the parameters asked for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream has said since its last piece. The last piece has a finish reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(slots=True)
class PartialCompletion:
    """A completion whose request may still be open."""

    request: Request
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    ending: Finished | None = None
    told: tuple[int, int] = (0, 0)  # characters and tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self.stream.matched_stop is not None

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Whether this token has stopped it. One that was made before the abort arrived says nothing."""
        if self.is_stopped:
            return False
        self.text += self.stream.push((token,))
        self.tokens.append(token)
        if logprobs:
            self.logprobs.append(logprobs)
        return self.is_stopped

    def end(self, ending: Finished) -> None:
        self.ending = ending
        self.text += self.stream.finish()

    def finish_reason(self) -> str:
        assert self.ending is not None, "a call waits for the end of each request"
        return FinishReason.STOP.value if self.is_stopped else self.ending.reason.value

    def piece(self) -> Piece | None:
        """What is new. Tokens without a text of their own come with the next text."""
        characters, tokens = self.told
        if not self.ending and len(self.text) == characters:
            return None
        self.told = len(self.text), len(self.tokens)
        reason = self.finish_reason() if self.ending else None
        return Piece(self.text[characters:], tuple(self.tokens[tokens:]), reason)

    def vector(self) -> list[float]:
        """Of a request with pooling."""
        assert self.ending is not None
        assert self.ending.embedding is not None
        return normalised(self.ending.embedding)

    def completion(self) -> Completion:
        assert self.ending is not None
        return Completion(
            self.text,
            tuple(self.tokens),
            self.finish_reason(),
            self.ending.prompt_tokens,
            self.ending.cached_tokens,
            tuple(self.logprobs),
            tuple(self.scores),
        )


# ── bell ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A bell wakes who waits for news: a thread, or a coroutine.


class ThreadBell(threading.Event):
    def wait_for_ring(self) -> None:
        self.wait()
        self.clear()


class LoopBell:
    """Any thread may ring it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def set(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no coroutine waits
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait_for_ring(self) -> None:
        await self._rung.wait()
        self._rung.clear()


# ── call ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Bell = ThreadBell | LoopBell
# What the engine says of one answer: a token, log-probabilities of its prompt, or its end.
Said = int | tuple[TokenLogprobs, ...] | Finished


class OpenCall:
    """The answers that a program waits for together. The engine's thread writes `news`, and the caller reads them."""

    def __init__(
        self,
        answers: list[PartialCompletion],
        per_prompt: int,
        bell: Bell,
        send: Callable[[Message], None],
        is_streamed: bool,
    ) -> None:
        self.answers = answers
        self._per_prompt = per_prompt
        self.bell = bell
        self._send = send
        self.news: deque[tuple[int, Said, TokenLogprobs | None]] = deque()
        # Text that is not read before its end is made at its end, unless a stop string may end it.
        self.wants_tokens = is_streamed or any(one.request.sampling.stop for one in answers)
        self._open = set(range(len(answers)))

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def read(self) -> int:
        """Take the news, and return how many requests have ended. Raises the error of the first that failed."""
        before = len(self._open)
        while self.news:
            index, said, logprobs = self.news.popleft()
            answer = self.answers[index]
            match said:
                case int():
                    if answer.push(said, logprobs):
                        self._abort(answer, is_complete=True)
                case Finished():
                    self._open.discard(index)
                    if error := _error_of(said, answer.is_stopped, index // self._per_prompt):
                        raise error
                    answer.end(said)
                case _:
                    answer.scores.extend(said)
        return before - len(self._open)

    def close(self) -> None:
        """Abort what has not ended: the caller was interrupted, has had enough, or knows of an error."""
        for index in self._open:
            self._abort(self.answers[index])
        self._open.clear()

    def _abort(self, answer: PartialCompletion, is_complete: bool = False) -> None:
        with suppress(EngineDiedError):  # and the request with it
            self._send(Abort(answer.request.request_id, time.monotonic(), is_complete))


def dead(reason: str) -> EngineDiedError:
    return EngineDiedError(reason if reason == CLOSED else f"{reason.rstrip('.')}. Make another LLM.")


def _error_of(ending: Finished, is_stopped: bool, prompt: int) -> RotaError | None:
    """An abort that the caller did not ask for means that the LLM is closed."""
    if fault := ending.fault:
        if fault.code is FaultCode.ENGINE_DIED:
            return dead(fault.message)
        return RequestError(replace(fault, message=f"Prompt {prompt}: {fault.message}"))
    return dead(CLOSED) if ending.reason is FinishReason.ABORT and not is_stopped else None


# ── desk ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The desk knows who waits for what. Events come to it in the engine's thread.


class Desk:
    def __init__(self) -> None:
        self._calls: dict[RequestId, tuple[OpenCall, int]] = {}
        self._adapters: dict[AdapterId, Future[Event]] = {}

    def expect(self, adapter_id: AdapterId) -> Future[Event]:
        """The event that says how the load or the removal of an adapter has ended."""
        return self._adapters.setdefault(adapter_id, Future())

    def add(self, call: OpenCall) -> None:
        for index, answer in enumerate(call.answers):
            self._calls[answer.request.request_id] = call, index

    def remove(self, call: OpenCall) -> None:
        for answer in call.answers:
            self._calls.pop(answer.request.request_id, None)

    def deliver(self, events: list[Event]) -> None:
        log_engines(events)
        touched: dict[OpenCall, None] = {}
        for event in events:
            match event:
                case Produced():
                    logprobs = dict(event.logprobs)
                    for index, (asked, token) in enumerate(zip(event.request_ids, event.tokens, strict=True)):
                        self._tell(touched, asked, token, logprobs.get(index))
                case PromptsScored():
                    for asked, scores in zip(event.request_ids, event.scores, strict=True):
                        self._tell(touched, asked, scores)
                case Finished():
                    self._tell(touched, event.request_id, event)
                case AdapterAdded() | AdapterRefused() | AdapterRemoved():
                    if expected := self._adapters.pop(event.adapter_id, None):
                        expected.set_result(event)
        for call in touched:
            call.bell.set()

    def _tell(
        self, touched: dict[OpenCall, None], request_id: RequestId, said: Said, logprobs: TokenLogprobs | None = None
    ) -> None:
        """The caller of a request may have left a moment ago."""
        if waiting := self._calls.get(request_id):
            call, index = waiting
            call.news.append((index, said, logprobs))
            if call.wants_tokens or isinstance(said, Finished):
                touched[call] = None
