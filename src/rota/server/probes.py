"""Probes tell a platform whether to keep this process, and whether to send it requests."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rota.runtime.service import Phase, Service, ServiceState
from rota.server.access.disclosure import reason_for
from rota.server.access.keys import Key


def install_probes(app: FastAPI, service: Service, key: Key) -> None:
    """Probes need no key: `key` says what a client without one may learn."""

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        """200 while requests are answered. 503 at the start, while the server stops, and while the engine is down."""
        state = service.state
        return _answer(state, key, is_good=state.phase is Phase.READY)

    @app.get("/livez")
    @app.head("/livez", include_in_schema=False)
    async def live() -> Response:
        """200 while the process lives, also while its engine starts again. 503 once the engine stays down."""
        state = service.state
        return _answer(state, key, is_good=state.phase is not Phase.DOWN)


def _answer(state: ServiceState, key: Key, is_good: bool) -> Response:
    body = {"status": state.phase.value} | ({"reason": reason_for(key, state.reason)} if state.reason else {})
    return JSONResponse(body, 200 if is_good else 503)
