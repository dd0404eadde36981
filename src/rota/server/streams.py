"""Streams carry events from the service's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rota.core.errors import RequestError
from rota.core.events import Admitted, Event, Finished, Produced
from rota.core.ids import RequestId
from rota.core.messages import Abort, Submit
from rota.core.plan import TokenLogprobs
from rota.core.request import Request
from rota.runtime.service import Service
from rota.server.errors import ClientGone


@dataclass(slots=True)
class Delta:
    """What one request got since somebody last looked: mostly one step's token."""

    tokens: list[int] = field(default_factory=list)
    # One per token, if the request asked for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # How much of the prompt was found in the KV cache; in the delta that has the first token.
    cached_tokens: int = 0
    ending: Finished | None = None


class Reply:
    """The answers to one HTTP request: one for each of its requests, by position."""

    def __init__(self, streams: Streams, request_ids: Sequence[RequestId]) -> None:
        self._streams = streams
        self._open = dict(enumerate(request_ids))
        self._deltas: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._is_abandoned = False

    async def next(self) -> dict[int, Delta]:
        """What came since the last call, by position; waits for something. Raises ClientGone."""
        await self._news.wait()
        if self._is_abandoned:
            raise ClientGone
        self._news.clear()
        deltas, self._deltas = self._deltas, {}
        return deltas

    def end(self, position: int) -> None:
        """Want no more of one request."""
        if request_id := self._open.pop(position, None):
            self._streams.abort(request_id)

    def close(self) -> None:
        """Want no more of any request."""
        for position in list(self._open):
            self.end(position)

    def abandon(self) -> None:
        """The client is gone: close, and wake whoever waits for news."""
        self.close()
        self._is_abandoned = True
        self._news.set()

    def delta(self, position: int) -> Delta:
        """Where news of one request is written; the caller calls `wake` when all is written."""
        return self._deltas.setdefault(position, Delta())

    def forget(self, position: int) -> None:
        """A request has ended by itself."""
        self._open.pop(position, None)

    def wake(self) -> None:
        self._news.set()


class Streams:
    """Who waits for which request. Everything but `deliver` runs on the event loop, `observe` too."""

    def __init__(self, service: Service, observe: Callable[[list[Event]], None]) -> None:
        """`observe` hears every event, before those who wait for it go on."""
        self._service = service
        self._observe = observe
        self._waiting: dict[RequestId, tuple[Reply, int]] = {}

    def start(self) -> None:
        """Start the service; its events reach the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._service.start(self.deliver)

    def open(self, requests: Sequence[Request]) -> Reply:
        """Submit requests together; raises RequestError, leaving none behind, if the service is down."""
        reply = Reply(self, [request.request_id for request in requests])
        try:
            for position, request in enumerate(requests):
                self._waiting[request.request_id] = (reply, position)
                self._service.send(Submit(request))
        except RequestError:
            for request in requests:
                self._waiting.pop(request.request_id, None)
            raise
        return reply

    def abort(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        with suppress(RequestError):  # the service may be down, and the request with it
            self._service.send(Abort(request_id, time.monotonic()))

    def deliver(self, events: list[Event]) -> None:
        """Called by the service's thread: one wake-up of the event loop a batch, however many read it."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        self._observe(events)
        touched: dict[Reply, None] = {}
        for event in events:
            match event:
                case Admitted(request_id, _, cached_tokens):
                    if waiting := self._waiting.get(request_id):
                        reply, position = waiting
                        reply.delta(position).cached_tokens = cached_tokens
                case Produced():
                    self._dispatch_tokens(event, touched)
                case Finished(request_id):
                    if waiting := self._waiting.pop(request_id, None):
                        reply, position = waiting
                        reply.delta(position).ending = event
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
