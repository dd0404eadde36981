"""Streams carry events from the service's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import ClientDisconnect

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Admitted, Event, Finished, FinishReason, Moved, Produced, PromptsScored
from rota.core.ids import RequestId
from rota.core.messages import Abort
from rota.core.plan import TokenLogprobs
from rota.core.request import Request
from rota.observe.observer import Observer
from rota.runtime.service import Service
from rota.text.parsed_delta import NOTHING_SAID, ParsedDelta

# ── observers ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Observers get every request and event; an observer that fails is logged once and never delays a token.

LOG = logging.getLogger("rota.server")

Listener = Callable[[list[Event]], None]


class Observers:
    """Observers get every request and event. Listeners get every event."""

    def __init__(self, observers: Sequence[Observer] = (), listeners: Sequence[Listener] = ()) -> None:
        self._observers = observers
        self._listeners: list[Listener] = [*(observer.observe for observer in observers), *listeners]
        self._failed: set[str] = set()

    def asked(self, request: Request) -> None:
        for observer in self._observers:
            self._tell(observer.asked, request.request_id, request.adapter_id, request.arrived_at, request.tenant.name)

    def observe(self, events: list[Event]) -> None:
        for listener in self._listeners:
            self._tell(listener, events)

    def _tell(self, hear: Callable[..., object], *news: Any) -> None:
        try:
            hear(*news)
        # Broad: an error in who hears, of any kind, must not keep a request from the engine, or tokens from clients.
        except Exception as error:
            name = getattr(hear, "__qualname__", repr(hear))
            if name not in self._failed:  # an observer that failed once fails with every token
                self._failed.add(name)
                LOG.error("%s failed; its figures may be wrong from here on.", name, exc_info=error)


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Delta:
    """What one request got since the last read: usually one step's token. Its answer adds what the tokens say."""

    position: int
    tokens: list[int] = field(default_factory=list)
    # One per token, if the request asked for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Log-probabilities of the prompt's next tokens, from the second on: the first has none. If the request asked.
    scores: list[TokenLogprobs] = field(default_factory=list)
    # Prompt tokens that were found in the KV cache. Set in the delta with the first token.
    cached_tokens: int = 0
    ending: Finished | None = None
    # From which token on another version of the adapter answers.
    moves: list[Moved] = field(default_factory=list)
    said: ParsedDelta = NOTHING_SAID
    finish_reason: str | None = None  # set in the last delta

    @property
    def has_news(self) -> bool:
        """False while text is held back, for example in the middle of a character."""
        return bool(self.said or self.logprobs or self.scores or self.finish_reason)


class CallReply:
    """The engine's events for one HTTP request: one delta for each of its requests that has news."""

    def __init__(self, streams: Streams, request_ids: Sequence[RequestId], idle_s: float | None) -> None:
        self._streams = streams
        self._open = dict(enumerate(request_ids))
        self._deltas: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._is_abandoned = False
        self._is_cancelled = False
        self.produced = 0  # tokens that the engine made, also those that no client has read
        self.wakes_at = 1  # so many tokens of one request; any other news wakes the reader at once
        self._idle_s = idle_s
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        if idle_s is not None:
            self._timer = asyncio.get_running_loop().call_later(idle_s, self._wake_if_idle, idle_s)

    async def next(self) -> list[Delta]:
        """Wait for news, then return it. Empty after `idle_s` without news. Raises ClientDisconnect."""
        if self._timer:
            self._waits_since = time.monotonic()
        await self._news.wait()
        if self._is_abandoned:
            raise ClientDisconnect
        self._news.clear()
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def end(self, position: int, is_complete: bool = True) -> None:
        """End one request: it is complete, or its client does not want it."""
        if request_id := self._open.pop(position, None):
            self._streams.abort(request_id, is_complete)

    def close(self) -> None:
        """End all requests."""
        if self._timer:
            self._timer.cancel()
        for position in list(self._open):
            self.end(position, is_complete=False)

    def abandon(self) -> None:
        """The client is gone: close, and wake the reader."""
        self.close()
        self._is_abandoned = True
        self._news.set()

    def cancel(self, position: int | None = None) -> None:
        """End one request, or all, for another caller. The client still gets the tokens so far, then an abort."""
        self._is_cancelled = True
        for other, request_id in self._open.items():
            if position in (None, other):
                self._streams.send_abort(request_id)

    def fail(self, fault: Fault) -> None:
        """End all open requests with an error, without the engine: it may be the engine that does not answer."""
        now = time.monotonic()
        for position, request_id in list(self._open.items()):
            self.end(position, is_complete=False)
            self.delta(position).ending = Finished(
                request_id=request_id, at=now, reason=FinishReason.FAILED, fault=fault
            )
        self._news.set()

    def delta(self, position: int) -> Delta:
        """The delta of one request, to write to. The caller calls `wake` after all writes."""
        delta = self._deltas.get(position)
        if delta is None:
            delta = self._deltas[position] = Delta(position)
        return delta

    def note_end(self, position: int, ending: Finished) -> None:
        """A request has ended in the engine."""
        self.delta(position).ending = _explained(ending, self._is_cancelled)
        self._open.pop(position, None)

    def wake(self) -> None:
        self._news.set()

    def _wake_if_idle(self, idle_s: float) -> None:
        """Wakes a reader that has waited this long. There is one timer per reply, not one per token."""
        waited_s = 0.0 if self._news.is_set() else time.monotonic() - self._waits_since
        if waited_s >= idle_s:
            self._news.set()
            waited_s = 0.0
        self._timer = asyncio.get_running_loop().call_later(idle_s - waited_s, self._wake_if_idle, idle_s)


class Streams:
    """Which reply waits for which request. Everything except `deliver` runs on the event loop, observers too."""

    def __init__(self, service: Service, observers: Observers | None = None) -> None:
        """Observers get every event before the replies do."""
        self._service = service
        self._observers = observers or Observers()
        self._waiting: dict[RequestId, tuple[CallReply, int]] = {}

    def start(self) -> None:
        """Start the service. Its events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._service.start(self.deliver)

    def open(self, requests: Sequence[Request], idle_s: float | None = None) -> CallReply:
        """Submit requests together. Raises RequestError if the service is down; then none stays open.

        With `idle_s`, a reader that has waited this long is woken without news.
        """
        reply = CallReply(self, [request.request_id for request in requests], idle_s)
        try:
            for position, request in enumerate(requests):
                self._waiting[request.request_id] = (reply, position)
                self._service.send(request)
                # After `send`: a service that is down raises there. Events come later, through the loop.
                self._observers.asked(request)
        except RequestError:
            reply.close()
            raise
        return reply

    def abort(self, request_id: RequestId, is_complete: bool) -> None:
        """End a request and get no more events of it."""
        self._waiting.pop(request_id, None)
        self.send_abort(request_id, is_complete)

    def send_abort(self, request_id: RequestId, is_complete: bool = False) -> None:
        """End a request. Its reply still gets the end."""
        with suppress(RequestError):  # the service may be down, and the request with it
            self._service.send(Abort(request_id, time.monotonic(), is_complete))

    def deliver(self, events: list[Event]) -> None:
        """Called by the service's thread. A batch of events wakes the event loop once, for any number of readers."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        self._observers.observe(events)
        touched: dict[CallReply, None] = {}
        for event in events:
            match event:
                case Produced():
                    self._dispatch_tokens(event, touched)
                case PromptsScored():
                    self._dispatch_scores(event, touched)
                case Admitted() | Moved():
                    self._note_seat(event)
                case Finished(request_id=request_id):
                    if waiting := self._waiting.pop(request_id, None):
                        reply, position = waiting
                        reply.note_end(position, event)
                        touched[reply] = None
        for reply in touched:
            reply.wake()

    def _note_seat(self, event: Admitted | Moved) -> None:
        """News that wake nobody: tokens follow."""
        if waiting := self._waiting.get(event.request_id):
            reply, position = waiting
            if isinstance(event, Moved):
                reply.delta(position).moves.append(event)
            else:
                reply.delta(position).cached_tokens = event.cached_tokens

    def _dispatch_tokens(self, event: Produced, touched: dict[CallReply, None]) -> None:
        logprobs = dict(event.logprobs)
        for index, (request_id, token) in enumerate(zip(event.request_ids, event.tokens, strict=True)):
            waiting = self._waiting.get(request_id)
            if waiting is None:
                continue  # its client left a moment ago
            reply, position = waiting
            delta = reply.delta(position)
            delta.tokens.append(token)
            reply.produced += 1
            if index in logprobs:
                delta.logprobs.append(logprobs[index])
            if len(delta.tokens) >= reply.wakes_at:
                touched[reply] = None

    def _dispatch_scores(self, event: PromptsScored, touched: dict[CallReply, None]) -> None:
        for request_id, new_scores in zip(event.request_ids, event.scores, strict=True):
            if waiting := self._waiting.get(request_id):
                reply, position = waiting
                reply.delta(position).scores.extend(new_scores)
                touched[reply] = None


def _explained(ending: Finished, is_cancelled: bool) -> Finished:
    """An abort that no client asked for means that the server is stopping."""
    if ending.reason is not FinishReason.ABORT or is_cancelled or ending.fault:
        return ending
    return replace(ending, fault=Fault(FaultCode.STOPPING, "The server is stopping; this request was aborted."))
