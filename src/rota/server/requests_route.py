"""GET /v1/requests/{id}: where an open request is, and why it is not further."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi import Request as HttpRequest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Explained, Whereabouts
from rota.core.request import Request
from rota.observe.journey import Journey
from rota.observe.metrics import Metrics
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.open_answers import OpenAnswer, OpenAnswers, name_of
from rota.server.queries import Queries

# A call can have thousands of requests; those behind these can hardly be further.
MOST_EXPLAINED = 16

ENDED = "ended"
# The first that any of its requests is in is the state of the whole call.
_FURTHEST_BEHIND = (Whereabouts.WAITING, Whereabouts.PARKED, Whereabouts.RUNNING, ENDED)


@dataclass(frozen=True, slots=True)
class RequestStanding:
    """One request: `since_s` is how long it has been in this state, `position` how many are before it in its queue."""

    id: str
    state: str  # waiting, parked, running, or ended: then the last of its answer is on the way
    reason: str
    since_s: float
    position: int | None
    output_tokens: int


@dataclass(frozen=True, slots=True)
class CallStanding:
    """A call as its request that is furthest behind; `requests` has the first few of those that are open."""

    id: str
    object: str
    model: str | None  # None if it was unloaded meanwhile
    state: str
    reason: str
    since_s: float
    position: int | None
    output_tokens: int
    open_requests: int
    requests: list[RequestStanding]


@dataclass(frozen=True, slots=True)
class RequestsRoute:
    """Whoever asked may ask why it takes so long; nobody else learns that there is such a request."""

    service: Service
    registry: Registry
    access: Access
    answers: OpenAnswers
    metrics: Metrics
    queries: Queries

    def install(self, app: FastAPI) -> None:
        app.add_api_route("/v1/requests/{id}", self.explain, methods=["GET"])

    async def explain(self, http: HttpRequest, id: str) -> CallStanding:
        """How a call that is being answered stands, by its X-Request-Id or the id of its answer."""
        answer = self._find(http, id)
        journeys = ((one, self.metrics.journeys.get(one.request_id)) for one in answer.requests)
        under_way = [(request, journey) for request, journey in journeys if journey]
        parts = await asyncio.gather(*(self._part(*one) for one in under_way[:MOST_EXPLAINED]))
        ended = RequestStanding(answer.answer_id, ENDED, "", 0.0, None, 0)
        behind = min(parts, key=lambda part: _FURTHEST_BEHIND.index(part.state), default=ended)
        return CallStanding(
            answer.answer_id,
            "request",
            self.registry.name_of(answer.requests[0].adapter_id),
            behind.state,
            behind.reason,
            behind.since_s,
            behind.position,
            sum(journey.tokens for _, journey in under_way),
            len(under_way),
            parts,
        )

    def _find(self, http: HttpRequest, id: str) -> OpenAnswer:
        key = self.access.key_of(http)
        answer = self.answers.find(key, id)
        if answer is None:
            message = f"No request with the id '{id}' is open; it has ended, or never was."
            raise RequestError(Fault(FaultCode.UNKNOWN_REQUEST, message, "id"))
        return answer

    async def _part(self, request: Request, journey: Journey) -> RequestStanding:
        told = await self.queries.explain(request.request_id)
        now = time.monotonic()
        if told is None:
            engine = self.service.state
            reason = "the engine is at a long step" if engine.capacity else f"the engine is {engine.phase.value}"
            told = Explained(
                request_id=request.request_id, at=now, state=Whereabouts.WAITING, reason=reason, since=journey.asked_at
            )
        position = told.position if told.state is Whereabouts.WAITING else None
        state, since = told.state.value, told.since
        if told.state is Whereabouts.RUNNING:
            since = journey.asked_at if journey.admitted_at is None else journey.admitted_at
        elif told.state is Whereabouts.UNKNOWN:
            state, since = ENDED, now
        return RequestStanding(name_of(request), state, told.reason, round(now - since, 3), position, journey.tokens)
