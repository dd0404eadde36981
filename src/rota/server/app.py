"""The application: which path is answered by whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rota.runtime.service import Phase, Service
from rota.server.completions import Completions
from rota.server.errors import install_error_handlers
from rota.server.streams import Streams
from rota.text.tokenizer import Tokenizer


def create_app(service: Service, tokenizer: Tokenizer, model_name: str, model_root: str) -> FastAPI:
    """An application that starts the service when it starts, and stops it when it ends."""

    streams = Streams(service)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        streams.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(title="Rota", lifespan=lifespan)
    install_error_handlers(app)
    app.add_api_route("/v1/completions", Completions(streams, tokenizer, model_name), methods=["POST"])

    @app.get("/health")
    async def health() -> Response:
        """200 once requests are answered; 503 before, and when the engine is down."""
        state = service.state
        body = {"status": state.phase.value} | ({"reason": state.reason} if state.reason else {})
        return JSONResponse(body, 200 if state.phase is Phase.READY else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        capacity = service.state.capacity
        base = {
            "id": model_name,
            "object": "model",
            "created": created,
            "owned_by": "rota",
            "root": model_root,
            "parent": None,
            "max_model_len": capacity and capacity.max_sequence_tokens,
        }
        return {"object": "list", "data": [base]}

    return app
