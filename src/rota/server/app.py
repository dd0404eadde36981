"""The application: which path is answered by whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rota.runtime.registry import Registry
from rota.runtime.service import Phase, Service
from rota.server.adapter_routes import install_adapter_routes
from rota.server.adapters import PATIENCE_S, AdapterFront
from rota.server.completions import Completions
from rota.server.errors import install_error_handlers
from rota.server.models import install_model_routes
from rota.server.streams import Streams
from rota.text.tokenizer import Tokenizer


def create_app(
    service: Service, tokenizer: Tokenizer, registry: Registry, unload_patience_s: float = PATIENCE_S
) -> FastAPI:
    """An application that starts the service when it starts, and stops it when it ends."""

    adapters = AdapterFront(service, registry, unload_patience_s)
    streams = Streams(service, adapters.observe)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        streams.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="Rota", lifespan=lifespan)
    install_error_handlers(app)
    app.add_api_route("/v1/completions", Completions(streams, tokenizer, registry), methods=["POST"])
    install_model_routes(app, service, registry)
    install_adapter_routes(app, adapters)

    @app.get("/health")
    async def health() -> Response:
        """200 once requests are answered; 503 before, and when the engine is down."""
        state = service.state
        body = {"status": state.phase.value} | ({"reason": state.reason} if state.reason else {})
        return JSONResponse(body, 200 if state.phase is Phase.READY else 503)

    return app
