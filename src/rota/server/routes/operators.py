"""Routes for operators and trainers: pause the server, ask why a request waits, and what is quarantined."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, fields
from typing import Annotated

from fastapi import Query
from fastapi import Request as HttpRequest
from pydantic import BaseModel

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Explained, Whereabouts
from rota.core.request import Request
from rota.observe.journey import Journey
from rota.policy.routing import RouteReason
from rota.runtime.blame import Blame
from rota.server.context import AppContext
from rota.server.open_answers import OpenAnswer, name_of
from rota.server.queries import Mode

# ── pause routes ────────────────────────────────────────────────────────────────────────────────────────────────────
# vLLM's routes for trainers: pause the server, let it go on, and ask how many devices it has.

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


async def pause(
    context: AppContext,
    http: HttpRequest,
    mode: Mode = "abort",
    clear_cache: bool = False,
    max_s: Annotated[float, Query(gt=0.0, le=MOST_S)] = DEFAULT_MAX_S,
) -> PausedBody:
    """Stop all answers, and come back once no step is computed.

    `mode=keep`: open answers stand still and go on after /resume. `wait`: they are finished first. `abort`: they
    end with the tokens so far. New requests wait for /resume, which comes by itself after `max_s` seconds.
    """
    with context.access.operating(http, "pause", mode=mode, max_s=max_s):
        _refuse_unknown(http, {"mode", "clear_cache", "max_s"})
        await context.pausing.begin(mode, max_s)
        if clear_cache and await context.queries.flush_cache() is None:
            message = "The server is paused, but an engine does not answer; its cache is unchanged."
            raise RequestError(Fault(FaultCode.ENGINE_DIED, message))
    return PausedBody(status="paused")


async def resume(context: AppContext, http: HttpRequest) -> PausedBody:
    """Let all answers go on. A server that is not paused stays as it is."""
    with context.access.operating(http, "resume") as details:
        details["paused_s"] = round(context.pausing.end(), 3)
    return PausedBody(status="resumed")


async def is_paused(context: AppContext) -> IsPausedBody:
    """Whether the server is paused."""
    return IsPausedBody(is_paused=context.pausing.paused_at is not None)


async def world_size(context: AppContext, include_dp: bool = True) -> WorldSizeBody:
    """How many devices compute: those of all replicas, or with `include_dp=false` those of one."""
    found = [engine.capacity.ranks for engine in context.service.state.engines if engine.capacity]
    if not found:
        message = "No engine serves yet, so the number of its devices is not known."
        raise RequestError(Fault(FaultCode.ENGINE_DIED, message))
    return WorldSizeBody(world_size=sum(found) if include_dp else found[0])


def _refuse_unknown(http: HttpRequest, known: set[str]) -> None:
    for name in http.query_params:
        if name not in known:
            raise RequestError.bad_field(name, f"/pause takes {', '.join(sorted(known))}; '{name[:100]}' is not known.")


# ── requests route ──────────────────────────────────────────────────────────────────────────────────────────────────
# GET /v1/requests/{id} says whether an open request waits or runs, and why.

# A call can have thousands of requests. The first few are enough to find the one that is furthest behind.
MOST_EXPLAINED = 16

ENDED = "ended"
# A call's state is the first of these that any of its requests is in.
_FURTHEST_BEHIND = (Whereabouts.WAITING, Whereabouts.PARKED, Whereabouts.RUNNING, ENDED)


@dataclass(frozen=True, slots=True)
class RequestStanding:
    """One request. `since_s` is its time in this state; `position` is the number of requests before it in its queue."""

    id: str
    state: str  # waiting, parked, running, or ended (its last tokens are being sent)
    reason: str
    since_s: float
    position: int | None
    output_tokens: int
    outlook: str = ""  # how near its adapter is to a slot, if it has none
    replica: int | None = None  # where it was sent; None on a server with one engine, and while a quota holds it back
    route: str = ""  # why there


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStanding(RequestStanding):
    """A call has the state of its request that is furthest behind. `requests` has its first few open requests."""

    object: str = "request"
    model: str | None  # None if the adapter was unloaded meanwhile
    open_requests: int
    requests: list[RequestStanding]


async def explain(context: AppContext, http: HttpRequest, id: str) -> CallStanding:
    """The state of an open call, by its X-Request-Id or the id of its answer."""
    answer = _open_answer(context, http, id)
    journeys = ((one, context.metrics.journeys.get(one.request_id)) for one in answer.requests)
    under_way = [(request, journey) for request, journey in journeys if journey]
    parts = await asyncio.gather(*(_standing(context, *one) for one in under_way[:MOST_EXPLAINED]))
    ended = RequestStanding(answer.answer_id, ENDED, "", 0.0, None, 0)
    behind = min(parts, key=lambda part: _FURTHEST_BEHIND.index(part.state), default=ended)
    # Engines answer one after the other, and tokens come meanwhile: the sum is that of the parts.
    tokens = sum(part.output_tokens for part in parts)
    tokens += sum(journey.tokens for _, journey in under_way[MOST_EXPLAINED:])
    told = {one.name: getattr(behind, one.name) for one in fields(behind)}
    return CallStanding(
        **told | {"id": answer.answer_id, "output_tokens": tokens},
        model=context.registry.name_of(answer.requests[0].adapter_id),
        open_requests=len(under_way),
        requests=parts,
    )


def _open_answer(context: AppContext, http: HttpRequest, id: str) -> OpenAnswer:
    """Only the key of a request, or an operator, can see it."""
    answer = context.answers.find(context.access.key_of(http), id)
    if answer is None:
        message = f"No request with the id '{id}' is open; it has ended, or never existed."
        raise RequestError(Fault(FaultCode.UNKNOWN_REQUEST, message, "id"))
    return answer


async def _standing(context: AppContext, request: Request, journey: Journey) -> RequestStanding:
    explained = await context.queries.explain(request.request_id)
    now = time.monotonic()
    if explained is None:
        engine = context.service.state
        reason = "the engine is at a long step" if engine.capacity else f"the engine is {engine.phase.value}"
        explained = Explained(
            request_id=request.request_id, at=now, state=Whereabouts.WAITING, reason=reason, since=journey.asked_at
        )
    position = explained.position if explained.state is Whereabouts.WAITING else None
    state, since = explained.state.value, explained.since
    if explained.state is Whereabouts.RUNNING:
        since = journey.asked_at if journey.admitted_at is None else journey.admitted_at
    elif explained.state is Whereabouts.UNKNOWN:
        state, since = ENDED, now
    return RequestStanding(
        name_of(request),
        state,
        explained.reason,
        round(now - since, 3),
        position,
        journey.tokens,
        explained.outlook,
        journey.engine_id,
        RouteReason[journey.route.upper()].value if journey.route else "",
    )


# ── quarantine routes ───────────────────────────────────────────────────────────────────────────────────────────────
# Routes for operators: which adapters engines died of, and which keys may load nothing for that.


class QuarantinedBody(BaseModel):
    """An adapter, the key that loaded it, since when (seconds since 1970), and why."""

    name: str
    key: str | None
    since: float
    reason: str


class QuarantineBody(BaseModel):
    """The quarantined adapters, and the keys that may load nothing until that right is given back."""

    adapters: list[QuarantinedBody]
    keys: list[str]


class LiftedBody(BaseModel):
    """What may be loaded again, or who may load again."""

    name: str


async def show_quarantine(context: AppContext) -> QuarantineBody:
    """The adapters that are not served because engines died of them, and the keys that lost `may_load`."""
    return quarantine_body(context.access.blame)


def quarantine_body(blame: Blame) -> QuarantineBody:
    found = [
        QuarantinedBody(name=one.name, key=one.owner, since=one.since, reason=one.reason) for one in blame.quarantines
    ]
    return QuarantineBody(adapters=found, keys=list(blame.barred))


async def lift_quarantine(context: AppContext, name: str, http: HttpRequest) -> LiftedBody:
    """Lift the quarantine of an adapter: it may be loaded again."""
    with context.access.operating(http, "lift_quarantine", adapter=name):
        if not context.access.blame.lift(name):
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, f"'{name[:200]}' is not quarantined.", "name"))
    return LiftedBody(name=name)


async def give_back(context: AppContext, name: str, http: HttpRequest) -> LiftedBody:
    """Give a key its right to load adapters back."""
    with context.access.operating(http, "give_back_may_load", of=name):
        if not context.access.blame.give_back(name):
            raise RequestError(Fault(FaultCode.UNKNOWN_MODEL, f"Key '{name[:200]}' has lost no right.", "name"))
    return LiftedBody(name=name)
