"""Queries put to the engine are answered by an event at its next pass, or not at all if it is down or too busy."""

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

# Longer than the longest step of a small machine, shorter than what scrapers wait.
PATIENCE_S = 3.0
# So often the patience, for what no earlier answer stands in for.
FIRST_TRIES = 20

Subject = RequestId | type[Inspected] | type[CacheFlushed]


class Queries:
    """Asks and waits for the answer, a bounded time. Everything here runs on the event loop."""

    def __init__(self, service: Service, patience_s: float = PATIENCE_S) -> None:
        self._service = service
        self._patience_s = patience_s
        self._open: dict[Subject, asyncio.Future[Any]] = {}
        # What this engine told last, whoever asked, and however late.
        self._last: Inspected | None = None

    async def inspect(self) -> Inspected | None:
        """How things stand; None if nobody answers in time."""
        return await self._ask(Inspected, Inspect(time.monotonic()))

    async def inspect_or_recall(self) -> Inspected | None:
        """How things stand, or how they stood by the last answer if the engine is at a long step.

        Before the first answer it waits longer. None if there is no engine.
        """
        for _ in range(FIRST_TRIES):
            told = await self.inspect()
            if self._service.state.capacity is None:
                return None
            if told or self._last:
                return told or self._last
        return None

    async def explain(self, request_id: RequestId) -> Explained | None:
        """Why a request waits; None if nobody answers in time."""
        return await self._ask(request_id, Explain(request_id, time.monotonic()))

    async def flush_cache(self) -> CacheFlushed | None:
        """Have the KV of earlier prompts forgotten; None if nobody answers in time."""
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
        """Whoever asks the same while it is open waits for the same answer."""
        if self._service.state.capacity is None:  # nobody is there to answer
            return None
        answer = self._open.get(subject)
        if answer is None:
            answer = self._open[subject] = asyncio.get_running_loop().create_future()
            try:
                self._service.send(query)
            except RequestError:  # it went down just now
                self._resolve(subject, None)
        done, _ = await asyncio.wait([answer], timeout=self._patience_s)
        if done:
            return answer.result()
        if self._open.get(subject) is answer:
            # The engine may have died with the query: the next one to ask shall ask anew.
            del self._open[subject]
        return None

    def _resolve(self, subject: Subject, event: QueryResult | None) -> None:
        if answer := self._open.pop(subject, None):
            answer.set_result(event)
