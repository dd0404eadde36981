"""A scrape gives the metrics to Prometheus, and to the endpoint picker of Kubernetes; tokens do not wait for it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator

from fastapi import Response

from rota.observe.exposition import CONTENT_TYPE, pieces
from rota.observe.metrics import Metrics
from rota.observe.snapshot import EngineReport, Snapshot, Stats, process_stats_of
from rota.runtime.service import Service, ServicePhase
from rota.server.queries import Queries

# The event loop writes for so long at a stretch; then tokens that have come leave.
STRETCH_S = 0.0003
# What the system tells of processes is asked for once in so long.
STATS_S = 1.0


class Scrapes:
    """Answers scrapes. Everything here runs on the event loop: a thread would hold Python's lock for 5 ms at a time."""

    def __init__(self, metrics: Metrics, service: Service, queries: Queries, for_picker: bool) -> None:
        self._metrics, self._service, self._queries, self._for_picker = metrics, service, queries, for_picker
        self._stats: Stats = {}
        self._stats_until = -math.inf

    async def answer(self) -> Response:
        inspected = await self._queries.count(self._metrics.with_places())
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
