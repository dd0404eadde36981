"""GET /metrics gives the metrics to Prometheus, and to the endpoint picker of Kubernetes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator

from fastapi import FastAPI, Request, Response

from rota.observe.exposition import EngineReport, Stats, pieces, process_stats_of, snapshot
from rota.observe.metrics import Metrics
from rota.observe.text_format import CONTENT_TYPE
from rota.runtime.service import Phase, Service
from rota.server.access.access import Access
from rota.server.counts import Counts

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
        reports = [
            EngineReport(
                engine_id=engine.engine_id,
                is_up=engine.capacity is not None,
                is_given_up=engine.phase is Phase.DOWN,
                capacity=engine.capacity,
                pid=engine.engine_pid,
                inspected=inspected.get(engine.engine_id),
            )
            for engine in engines
        ]
        taken = snapshot(self._metrics, reports, time.time() if self._for_picker else None)
        if time.monotonic() > self._stats_until:
            self._stats_until = time.monotonic() + STATS_S
            self._stats = await asyncio.to_thread(process_stats_of, taken)
        return Response(await joined(pieces(taken, self._stats)), media_type=CONTENT_TYPE)


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


def install_metrics_route(app: FastAPI, scrapes: Scrapes, access: Access) -> None:
    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(http: Request) -> Response:
        """All metrics in Prometheus' text format. While the engine is down, the engine's own metrics are missing."""
        access.operator_of(http)
        return await scrapes.answer()
