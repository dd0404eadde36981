"""vLLM's routes for trainers: pause the server, let it go on, and ask how many devices it has."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi import Request as HttpRequest
from pydantic import BaseModel

from rota.core.errors import Fault, FaultCode, RequestError
from rota.server.audit import audited
from rota.server.front import Front
from rota.server.openapi import gives
from rota.server.pausing import Mode
from rota.server.queries import Queries

# A trainer that died must not keep clients waiting for ever.
DEFAULT_MAX_S, MOST_S = 3600.0, 86_400.0


class PausedBody(BaseModel):
    """What the server does now."""

    status: str


class IsPausedBody(BaseModel):
    """Whether the server is paused."""

    is_paused: bool


class WorldSizeBody(BaseModel):
    """How many devices compute."""

    world_size: int


def install_pause_routes(app: FastAPI, front: Front, queries: Queries) -> None:
    _install_pause(app, front, queries)
    _install_resume(app, front)
    _install_world_size(app, front)


def _install_pause(app: FastAPI, front: Front, queries: Queries) -> None:
    @app.post("/pause", responses=gives(PausedBody))
    async def pause(
        http: HttpRequest,
        mode: Mode = "abort",
        clear_cache: bool = False,
        max_s: Annotated[float, Query(gt=0.0, le=MOST_S)] = DEFAULT_MAX_S,
    ) -> dict[str, str]:
        """Stop all answers, and come back once no step is computed.

        `mode=keep`: open answers stand still and go on after /resume. `wait`: they are finished first. `abort`: they
        end with the tokens so far. New requests wait for /resume, which comes by itself after `max_s` seconds.
        """
        with audited(http, front.access.key_of(http), "pause", mode=mode, max_s=max_s):
            front.access.operator_of(http)
            _refuse_unknown(http, {"mode", "clear_cache", "max_s"})
            await front.pausing.begin(mode, max_s)
            if clear_cache and await queries.flush_cache() is None:
                message = "The server is paused, but an engine does not answer; its cache is unchanged."
                raise RequestError(Fault(FaultCode.ENGINE_DIED, message))
        return {"status": "paused"}


def _install_resume(app: FastAPI, front: Front) -> None:
    @app.post("/resume", responses=gives(PausedBody))
    async def resume(http: HttpRequest) -> dict[str, str]:
        """Let all answers go on. A server that is not paused stays as it is."""
        with audited(http, front.access.key_of(http), "resume") as details:
            front.access.operator_of(http)
            details["paused_s"] = round(front.pausing.end(), 3)
        return {"status": "resumed"}

    @app.get("/is_paused", responses=gives(IsPausedBody))
    async def is_paused(http: HttpRequest) -> dict[str, bool]:
        """Whether the server is paused."""
        front.access.operator_of(http)
        return {"is_paused": front.pausing.paused_at is not None}


def _install_world_size(app: FastAPI, front: Front) -> None:
    @app.get("/get_world_size", responses=gives(WorldSizeBody))
    async def world_size(http: HttpRequest, include_dp: bool = True) -> dict[str, Any]:
        """How many devices compute: those of all replicas, or with `include_dp=false` those of one."""
        front.access.operator_of(http)
        found = [engine.capacity.ranks for engine in front.service.state.engines if engine.capacity]
        if not found:
            message = "No engine serves yet, so the number of its devices is not known."
            raise RequestError(Fault(FaultCode.ENGINE_DIED, message))
        return {"world_size": sum(found) if include_dp else found[0]}


def _refuse_unknown(http: HttpRequest, known: set[str]) -> None:
    for name in http.query_params:
        if name not in known:
            raise RequestError.bad_field(name, f"/pause takes {', '.join(sorted(known))}; '{name[:100]}' is not known.")
