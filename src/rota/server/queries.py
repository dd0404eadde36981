"""The engine answers a query with an event at its next pass, or not in time if it is down or busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from rota.core.errors import RequestError
from rota.core.events import CacheFlushed, EngineRestarted, Event, Explained, Inspected, QueryResult
from rota.core.ids import RequestId
from rota.core.messages import Explain, FlushCache, Inspect, Query
from rota.runtime.service import Service

# Longer than the longest step of a small machine, and shorter than the timeout of scrapers.
PATIENCE_S = 3.0
# How many times the patience is spent if there is no earlier answer to fall back on.
FIRST_TRIES = 20

Subject = RequestId | type[Inspected] | type[CacheFlushed]


class Queries:
    """Sends queries and waits for answers, for a bounded time. Everything here runs on the event loop."""

    def __init__(self, service: Service, patience_s: float = PATIENCE_S) -> None:
        self._service = service
        self._patience_s = patience_s
        self._open: dict[Subject, asyncio.Future[Any]] = {}
        # The last state that this engine sent, also if it came too late for its query.
        self._last: Inspected | None = None

    async def inspect(self) -> Inspected | None:
        """The engine's state. None without an answer in time."""
        return await self._ask(Inspected, Inspect(time.monotonic()))

    async def inspect_or_recall(self) -> Inspected | None:
        """The engine's state, or the last known one while the engine is in a long step.

        Before the first answer it waits longer. None without an engine.
        """
        for _ in range(FIRST_TRIES):
            inspected = await self.inspect()
            if self._service.state.capacity is None:
                return None
            if inspected or self._last:
                return inspected or self._last
        return None

    async def explain(self, request_id: RequestId) -> Explained | None:
        """Why a request waits. None without an answer in time."""
        return await self._ask(request_id, Explain(request_id, time.monotonic()))

    async def flush_cache(self) -> CacheFlushed | None:
        """Drop the KV of earlier prompts. None without an answer in time."""
        return await self._ask(CacheFlushed, FlushCache(time.monotonic()))

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:  # nearly always a step's tokens
            match event:
                case Explained(request_id=request_id):
                    self._resolve(request_id, event)
                case Inspected():
                    self._last = event
                    self._resolve(Inspected, event)
                case CacheFlushed():
                    self._resolve(CacheFlushed, event)
                case EngineRestarted():
                    self._last = None

    async def _ask(self, subject: Subject, query: Query) -> Any:
        """Send a query. If the same query is open, wait for its answer."""
        if self._service.state.capacity is None:  # there is no engine
            return None
        answer = self._open.get(subject)
        if answer is None:
            answer = self._open[subject] = asyncio.get_running_loop().create_future()
            try:
                self._service.send(query)
            except RequestError:  # the engine went down just now
                self._resolve(subject, None)
        done, _ = await asyncio.wait([answer], timeout=self._patience_s)
        if done:
            return answer.result()
        if self._open.get(subject) is answer:
            # The engine may have died with the query, so the next caller sends a new one.
            del self._open[subject]
        return None

    def _resolve(self, subject: Subject, event: QueryResult | None) -> None:
        if answer := self._open.pop(subject, None):
            answer.set_result(event)
