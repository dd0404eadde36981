"""What clients and platforms ask first: which models a request may name, and whether the server lives and is ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from rota.core.adapter import Adapter
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.context import AppContext
from rota.server.docs import gives
from rota.server.long_lists import list_response
from rota.server.openai.writer import ModelBody, ModelsBody
from rota.server.queries import PAUSED

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# GET /v1/models lists the models that a request may name, the base model first.


def install_model_routes(app: FastAPI, context: AppContext) -> None:
    """A key sees only the models that it may use."""
    created = int(time.time())
    base = context.registry.base

    def longest() -> int | None:
        capacity = context.service.state.capacity
        return capacity.max_sequence_tokens if capacity else None

    def entry(key: Key, model: Adapter, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "rota",
            "root": path_for(key, model),
            "parent": None if model is base else base.name,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models", responses=gives(ModelsBody))
    async def models(http: HttpRequest) -> Response:
        """The values of `model`: the base model first, then its adapters. A key sees only what it may use.

        `root` is the model's folder for operators, and the model's name for other keys.
        """
        key, most = context.access.key_of(http), longest()
        entries = (entry(key, one, most) for one in context.access.visible(key))
        return await list_response('{"object":"list","data":', entries)

    @app.get("/v1/models/{name:path}", responses=gives(ModelBody))
    async def model(name: str, http: HttpRequest) -> dict[str, Any]:
        """One model."""
        key = context.access.key_of(http)
        return entry(key, context.access.find(key, name), longest())


# ── probes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Probes tell a platform whether to keep this process, and whether to send it requests.

# Stands in the place of the service's phase while every engine that serves stands still for ever.
STUCK = "stuck"


def install_probes(app: FastAPI, context: AppContext) -> None:
    """Probes need no key."""
    service, pausing, key = context.service, context.pausing, context.access.for_probes

    def answer(good: Callable[[str], bool]) -> Response:
        state = service.state
        is_paused = state.phase is ServicePhase.READY and pausing.paused_at is not None
        status = PAUSED if is_paused else STUCK if _is_stuck(state) else state.phase.value
        reason = " ".join([*filter(None, [state.reason]), *_standstills(state)])
        body = {"status": status} | ({"reason": reason_for(key, reason)} if reason else {})
        return JSONResponse(body, 200 if good(status) else 503)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def healthy() -> Response:
        """200 while the engine serves, also while the server is paused. 503 at the start, while the server stops, and
        while the engine is stuck or down."""
        return answer(lambda status: status in (ServicePhase.READY, PAUSED))

    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        """200 while requests are answered, or wait for a slow disk. 503 otherwise, also while the server is paused."""
        return answer(lambda status: status == ServicePhase.READY)

    @app.get("/livez")
    @app.head("/livez", include_in_schema=False)
    async def live() -> Response:
        """200 while the process lives, also while its engine starts again. 503 once the engine stays down."""
        return answer(lambda status: status != ServicePhase.DOWN)


def _is_stuck(state: ServiceState) -> bool:
    serving = [one.standstill for one in state.engines if one.phase is ServicePhase.READY]
    return (
        state.phase is ServicePhase.READY and bool(serving) and all(one is not None and one.is_stuck for one in serving)
    )


def _standstills(state: ServiceState) -> list[str]:
    now = time.monotonic()
    return [f"Engine {one.engine_id}: {one.standstill.sentence(now)}" for one in state.engines if one.standstill]
