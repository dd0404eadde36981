"""Probes tell a platform whether to keep this process, and whether to send it requests."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rota.runtime.service import Phase, Service, ServiceState


def install_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        """200 while requests are answered. 503 at the start, while the server stops, and while the engine is down."""
        state = service.state
        return _answer(state, is_good=state.phase is Phase.READY)

    @app.get("/livez")
    @app.head("/livez", include_in_schema=False)
    async def live() -> Response:
        """200 while the process lives, also while its engine starts again. 503 once the engine stays down."""
        state = service.state
        return _answer(state, is_good=state.phase is not Phase.DOWN)


def _answer(state: ServiceState, is_good: bool) -> Response:
    body = {"status": state.phase.value} | ({"reason": state.reason} if state.reason else {})
    return JSONResponse(body, 200 if is_good else 503)
