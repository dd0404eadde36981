"""Counts ask the engines for numbers at every scrape, and do not let a scraper wait for a long step.

An engine answers between two steps. A scraper that comes often gets the engine's last answer while a step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from rota.core.errors import RequestError
from rota.core.events import EngineRestarted, Event, Inspected
from rota.core.ids import AdapterId, EngineId
from rota.core.messages import Inspect
from rota.runtime.service import Service
from rota.server.queries import PATIENCE_S, Gathering

# So long a scrape waits for a new answer if there is one that is not older than FRESH_S.
QUICK_S = 0.002
FRESH_S = 0.25


class Counts:
    """For the event loop only."""

    def __init__(self, service: Service, patience_s: float = PATIENCE_S) -> None:
        self._service = service
        self._patience_s = patience_s
        self._last: dict[EngineId, Inspected] = {}  # the last answer of each engine
        self._open: Gathering[Inspected] | None = None
        self._asked_at = 0.0

    async def ask(self, only: tuple[AdapterId, ...]) -> dict[EngineId, Inspected]:
        """The numbers of each engine that serves; an engine that does not answer in time is left out."""
        engines = [engine.engine_id for engine in self._service.state.engines if engine.capacity is not None]
        now = time.monotonic()
        asking = self._asking(engines, only, now)
        if asking is None:
            return {}
        is_known = all(self._is_fresh(one, now) for one in engines)
        await asyncio.wait([asking.done], timeout=QUICK_S if is_known else self._patience_s)
        return {one: self._last[one] for one in engines if self._is_fresh(one, now)}

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Inspected(is_whole=False):
                    self._last[event.engine_id] = event
                    if self._open:
                        self._open.take(event)
                case EngineRestarted(engine_id=engine_id):
                    self._last.pop(engine_id, None)
                    if self._open:
                        self._open.expect_no_more(engine_id)

    def _is_fresh(self, engine_id: EngineId, now: float) -> bool:
        last = self._last.get(engine_id)
        return last is not None and last.at >= now - FRESH_S

    def _asking(self, engines: list[EngineId], only: tuple[AdapterId, ...], now: float) -> Gathering[Inspected] | None:
        """The question that is open, or a new one: in a long step, scrapes do not pile up questions."""
        if self._open and not self._open.done.done() and now < self._asked_at + self._patience_s:
            return self._open
        self._open = None
        if not engines:
            return None
        try:
            self._service.send(Inspect(now, only))
        except RequestError:  # the engines went down just now
            return None
        self._open, self._asked_at = Gathering(engines), now
        return self._open
