"""GET /metrics gives the metrics to Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from rota.observe.exposition import CONTENT_TYPE, EngineReport, render, snapshot
from rota.observe.metrics import Metrics
from rota.runtime.service import Phase, Service
from rota.server.access.access import Access
from rota.server.queries import Queries


def install_metrics_route(app: FastAPI, metrics: Metrics, service: Service, queries: Queries, access: Access) -> None:
    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(http: Request) -> Response:
        """All metrics in Prometheus' text format. While the engine is down, the engine's own metrics are missing."""
        access.operator_of(http)
        inspected = {one.engine_id: one for one in await queries.inspect()}
        engines = [
            EngineReport(
                engine_id=engine.engine_id,
                is_up=engine.capacity is not None,
                is_given_up=engine.phase is Phase.DOWN,
                pid=engine.engine_pid,
                inspected=inspected.get(engine.engine_id),
            )
            for engine in service.state.engines
        ]
        taken = snapshot(metrics, engines)
        return Response(await asyncio.to_thread(render, taken), media_type=CONTENT_TYPE)
