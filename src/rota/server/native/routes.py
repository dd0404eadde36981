"""SGLang's routes for operators show the server's state, test that it answers, flush its cache and end calls."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.runtime.service import ServicePhase
from rota.server.access.access import Right
from rota.server.access.audit import audited
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.answers.respond import respond
from rota.server.calls.fields import Fields, read_body
from rota.server.context import AppContext
from rota.server.native.call import GenerateFields, read_generate
from rota.server.native.writer import (
    AbortedBody,
    GenerateBody,
    GeneratedBody,
    GenerateWriter,
    HealthBody,
    ModelInfoBody,
)
from rota.server.queries import PAUSED
from rota.server.route import get, post

# A token may wait for a long step and for other requests. After this time it will hardly come.
PROBE_S = 20.0


class AbortFields(Fields):
    """Which calls to end: one by its name, or all calls of the key."""

    rid: str | None = None
    abort_all: bool | None = None


async def generate(context: AppContext, http: HttpRequest) -> Response:
    """Continue prompts, in SGLang's shape: one object, or a list of them for a list of prompts."""
    return await respond(context, http, read_generate, GenerateWriter)


async def health_generate(context: AppContext, http: HttpRequest) -> Response:
    """200 if a token comes in time."""
    return await health_within(PROBE_S, context, http)


async def health_within(probe_s: float, context: AppContext, http: HttpRequest) -> Response:
    key = context.access.key_of(http)
    state = context.service.state
    if state.phase is not ServicePhase.READY:
        return JSONResponse({"status": state.phase.value, "reason": reason_for(key, state.reason)}, 503)
    if context.pausing.paused_at is not None:
        return JSONResponse({"status": PAUSED, "reason": "No token comes before /resume."}, 503)
    reply = context.streams.open([_probe(context, key)])
    try:
        (delta,) = await asyncio.wait_for(reply.next(), probe_s)
    except TimeoutError:
        return JSONResponse({"status": "stuck", "reason": f"No token came within {probe_s:g} seconds."}, 503)
    finally:
        reply.close()
    if (ending := delta.ending) and ending.fault:
        raise RequestError(ending.fault)
    return JSONResponse({"status": "ready"})


async def model_info(context: AppContext, http: HttpRequest) -> ModelInfoBody:
    """Which model is served, and how long its sequences may be. Only operators see its folder."""
    base, capacity = context.registry.base, context.service.state.capacity
    path = path_for(context.access.key_of(http), base)
    return ModelInfoBody(
        model_path=path,
        tokenizer_path=path,
        served_model_name=base.name,
        context_length=capacity.max_sequence_tokens if capacity else None,
    )


async def flush_cache(context: AppContext, http: HttpRequest) -> PlainTextResponse:
    """Drop the KV of earlier prompts. KV that is in use stays."""
    with context.access.operating(http, "flush_cache") as details:
        flushed = await context.queries.flush_cache()
        if flushed is None:
            raise RequestError(Fault(FaultCode.ENGINE_DIED, "An engine does not answer; its cache is unchanged."))
        details["blocks"] = flushed.blocks
    return PlainTextResponse(f"The cache is flushed: {flushed.blocks} blocks were dropped.\n")


async def abort_request(context: AppContext, http: HttpRequest) -> AbortedBody:
    """End open calls. A key ends only its own calls, unless it may operate the server."""
    key = context.access.key_of(http)
    fields = read_body(AbortFields, await http.body())
    if bool(fields.rid) == bool(fields.abort_all):
        raise RequestError.bad_field("rid", "Send either rid, or abort_all as true.")
    if fields.rid:
        own = [answer] if (answer := context.answers.find(key, fields.rid)) else []
    else:
        own = [answer for answer in context.answers if key.may_operate or answer.caller.key.name == key.name]
    with audited(http, key, "abort", request=fields.rid or "all", aborted=len(own)):
        for answer in own:
            answer.cancel(fields.rid)
    return AbortedBody(aborted=len(own))


def _probe(context: AppContext, key: Key) -> Request:
    """The shortest possible request."""
    name = RequestId(f"health-{uuid.uuid4().hex}")
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=name,
        prompt=context.tokenizer.encode("Hi"),
        sampling=sampling,
        arrived_at=time.monotonic(),
        tenant=key.tenant,
        cache_scope=key.cache_scope,
    )


ROUTES = (
    post("/generate", Right.MODEL, generate, GenerateFields, GenerateBody, GeneratedBody),
    get("/health_generate", Right.ANY, health_generate, gives=HealthBody),
    get("/model_info", Right.ANY, model_info, gives=ModelInfoBody, also=("GET /get_model_info",)),
    post("/flush_cache", Right.OPERATE, flush_cache, is_text=True, also=("GET /flush_cache",)),
    post("/abort_request", Right.OWN, abort_request, AbortFields, AbortedBody),
)
