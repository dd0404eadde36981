"""Streams carry events from the service's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Admitted, Event, Finished, FinishReason, Produced, PromptsScored
from rota.core.ids import RequestId
from rota.core.messages import Abort, Submit
from rota.core.plan import TokenLogprobs
from rota.core.request import Request
from rota.runtime.service import Service
from rota.server.errors import ClientGone
from rota.server.observers import Observers


@dataclass(slots=True)
class Delta:
    """What one request got since somebody last looked: mostly one step's token."""

    tokens: list[int] = field(default_factory=list)
    # One per token, if the request asked for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Of the prompt's next tokens, if the request asked for them.
    scores: list[TokenLogprobs] = field(default_factory=list)
    # How much of the prompt was found in the KV cache; in the delta that has the first token.
    cached_tokens: int = 0
    ending: Finished | None = None


class Reply:
    """The answers to one HTTP request: one for each of its requests, by position."""

    def __init__(self, streams: Streams, request_ids: Sequence[RequestId], lull_s: float | None) -> None:
        self._streams = streams
        self._open = dict(enumerate(request_ids))
        self._deltas: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._is_abandoned = False
        self.is_called_off = False
        self._lull_s = lull_s
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        if lull_s is not None:
            self._timer = asyncio.get_running_loop().call_later(lull_s, self._look_for_a_lull, lull_s)

    async def next(self) -> dict[int, Delta]:
        """What came since the last call, by position; waits for something. Empty in a lull. Raises ClientGone."""
        if self._timer:
            self._waits_since = time.monotonic()
        await self._news.wait()
        if self._is_abandoned:
            raise ClientGone
        self._news.clear()
        deltas, self._deltas = self._deltas, {}
        return deltas

    def end(self, position: int, is_complete: bool = True) -> None:
        """Want no more of one request: it is complete, or nobody reads it."""
        if request_id := self._open.pop(position, None):
            self._streams.abort(request_id, is_complete)

    def close(self) -> None:
        """Want no more of any request."""
        if self._timer:
            self._timer.cancel()
        for position in list(self._open):
            self.end(position, is_complete=False)

    def abandon(self) -> None:
        """The client is gone: close, and wake whoever waits for news."""
        self.close()
        self._is_abandoned = True
        self._news.set()

    def call_off(self, position: int | None = None) -> None:
        """Somebody else wants one request ended, or all: the client still hears what came, and that it was aborted."""
        self.is_called_off = True
        for other, request_id in self._open.items():
            if position in (None, other):
                self._streams.send_abort(request_id)

    def fail(self, fault: Fault) -> None:
        """End whatever is still open with an error, here and now: the engine may be what does not answer."""
        now = time.monotonic()
        for position, request_id in list(self._open.items()):
            self.end(position, is_complete=False)
            self.delta(position).ending = Finished(
                request_id=request_id, at=now, reason=FinishReason.FAILED, fault=fault
            )
        self._news.set()

    def delta(self, position: int) -> Delta:
        """Where news of one request is written; the caller calls `wake` when all is written."""
        delta = self._deltas.get(position)
        if delta is None:
            delta = self._deltas[position] = Delta()
        return delta

    def forget(self, position: int) -> None:
        """A request has ended by itself."""
        self._open.pop(position, None)

    def wake(self) -> None:
        self._news.set()

    def _look_for_a_lull(self, lull_s: float) -> None:
        """Wakes a reader that has waited for so long. One timer a reply, and not one a token."""
        waited_s = 0.0 if self._news.is_set() else time.monotonic() - self._waits_since
        if waited_s >= lull_s:
            self._news.set()
            waited_s = 0.0
        self._timer = asyncio.get_running_loop().call_later(lull_s - waited_s, self._look_for_a_lull, lull_s)


class Streams:
    """Who waits for which request. Everything but `deliver` runs on the event loop, observers too."""

    def __init__(self, service: Service, observers: Observers | None = None) -> None:
        """Observers hear of everything before those who wait for it go on."""
        self._service = service
        self._onlookers = observers or Observers()
        self._waiting: dict[RequestId, tuple[Reply, int]] = {}

    def start(self) -> None:
        """Start the service; its events reach the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._service.start(self.deliver)

    def open(self, requests: Sequence[Request], lull_s: float | None = None) -> Reply:
        """Submit requests together; raises RequestError, leaving none behind, if the service is down.

        With `lull_s` a reader that has waited for so long is woken, with nothing.
        """
        reply = Reply(self, [request.request_id for request in requests], lull_s)
        try:
            for position, request in enumerate(requests):
                self._waiting[request.request_id] = (reply, position)
                self._service.send(Submit(request))
                # Not before: a service that is down tells no end. Events come through the loop, so not before this.
                self._onlookers.asked(request)
        except RequestError:
            reply.close()
            raise
        return reply

    def abort(self, request_id: RequestId, is_complete: bool) -> None:
        """Want no more of a request, nor hear of it."""
        self._waiting.pop(request_id, None)
        self.send_abort(request_id, is_complete)

    def send_abort(self, request_id: RequestId, is_complete: bool = False) -> None:
        """Want no more of a request; whoever waits for it hears its end."""
        with suppress(RequestError):  # the service may be down, and the request with it
            self._service.send(Abort(request_id, time.monotonic(), is_complete))

    def deliver(self, events: list[Event]) -> None:
        """Called by the service's thread: one wake-up of the event loop a batch, however many read it."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        self._onlookers.hear(events)
        touched: dict[Reply, None] = {}
        for event in events:
            match event:
                case Produced():
                    self._dispatch_tokens(event, touched)
                case PromptsScored():
                    self._dispatch_scores(event, touched)
                case Admitted(request_id=request_id, cached_tokens=cached_tokens):
                    if waiting := self._waiting.get(request_id):
                        reply, position = waiting
                        reply.delta(position).cached_tokens = cached_tokens
                case Finished(request_id=request_id):
                    if waiting := self._waiting.pop(request_id, None):
                        reply, position = waiting
                        reply.delta(position).ending = _explained(event, reply.is_called_off)
                        reply.forget(position)
                        touched[reply] = None
        for reply in touched:
            reply.wake()

    def _dispatch_tokens(self, event: Produced, touched: dict[Reply, None]) -> None:
        logprobs = dict(event.logprobs)
        for index, (request_id, token) in enumerate(zip(event.request_ids, event.tokens, strict=True)):
            waiting = self._waiting.get(request_id)
            if waiting is None:
                continue  # its client left a moment ago
            reply, position = waiting
            delta = reply.delta(position)
            delta.tokens.append(token)
            if index in logprobs:
                delta.logprobs.append(logprobs[index])
            touched[reply] = None

    def _dispatch_scores(self, event: PromptsScored, touched: dict[Reply, None]) -> None:
        for request_id, told in zip(event.request_ids, event.scores, strict=True):
            if waiting := self._waiting.get(request_id):
                reply, position = waiting
                reply.delta(position).scores.extend(told)
                touched[reply] = None


def _explained(ending: Finished, is_called_off: bool) -> Finished:
    """An abort that nobody on this side asked for is the service's own end."""
    if ending.reason is not FinishReason.ABORT or is_called_off or ending.fault:
        return ending
    return replace(ending, fault=Fault(FaultCode.STOPPING, "The server is stopping; this request was aborted."))
