"""Scrapes ask the engines for numbers, and write the metrics without making a token or a scraper wait."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator

from fastapi import Response

from rota.core.errors import RequestError
from rota.core.events import EngineRestarted, Event, Inspected
from rota.core.ids import AdapterId, EngineId
from rota.core.messages import Inspect
from rota.observe.exposition import CONTENT_TYPE, pieces
from rota.observe.metrics import Metrics
from rota.observe.snapshot import EngineReport, Snapshot, Stats, process_stats_of
from rota.runtime.service import Service, ServicePhase
from rota.server.queries import TIMEOUT_S, Gathering

# ── counts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Counts ask the engines for numbers at every scrape, and do not let a scraper wait for a long step.
#
# An engine answers between two steps. A scraper that comes often gets the engine's last answer while a step runs.

# So long a scrape waits for a new answer if there is one that is not older than FRESH_S.
QUICK_S = 0.002
FRESH_S = 0.25


class Counts:
    """For the event loop only."""

    def __init__(self, service: Service, timeout_s: float = TIMEOUT_S) -> None:
        self._service = service
        self._timeout_s = timeout_s
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
        await asyncio.wait([asking.done], timeout=QUICK_S if is_known else self._timeout_s)
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
        if self._open and not self._open.done.done() and now < self._asked_at + self._timeout_s:
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


# ── scrapes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A scrape gives the metrics to Prometheus, and to the endpoint picker of Kubernetes.

# The event loop writes for so long at a stretch; then tokens that have come leave.
STRETCH_S = 0.0003
# What the system tells of processes is asked for once in so long.
STATS_S = 1.0


class Scrapes:
    """Answers scrapes. Everything here runs on the event loop: a thread would hold Python's lock for 5 ms at a time."""

    def __init__(self, metrics: Metrics, service: Service, counts: Counts, for_picker: bool) -> None:
        self._metrics, self._service, self._counts, self._for_picker = metrics, service, counts, for_picker
        self._stats: Stats = {}
        self._stats_until = -math.inf

    async def answer(self) -> Response:
        inspected = await self._counts.ask(self._metrics.with_places())
        engines = self._service.state.engines
        self._metrics.meet(engine.engine_id for engine in engines)
        reports = tuple(
            EngineReport(
                engine_id=engine.engine_id,
                is_up=engine.capacity is not None,
                is_given_up=engine.phase is ServicePhase.DOWN,
                capacity=engine.capacity,
                pid=engine.engine_pid,
                inspected=inspected.get(engine.engine_id),
            )
            for engine in engines
        )
        if time.monotonic() > self._stats_until:
            self._stats_until = time.monotonic() + STATS_S
            self._stats = await asyncio.to_thread(process_stats_of, reports)
        wall_at = time.time() if self._for_picker else None
        taken = Snapshot(metrics=self._metrics, reports=reports, stats=self._stats, wall_at=wall_at)
        return Response(await joined(pieces(taken)), media_type=CONTENT_TYPE)


async def joined(parts: Iterator[str]) -> bytes:
    """The parts as one text, made in short stretches."""
    written: list[str] = []
    await asyncio.sleep(0)
    began_at = time.perf_counter()
    for part in parts:
        written.append(part)
        if time.perf_counter() - began_at > STRETCH_S:
            await asyncio.sleep(0)
            began_at = time.perf_counter()
    return "".join(written).encode()
