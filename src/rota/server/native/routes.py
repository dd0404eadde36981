"""SGLang's routes for operators show the server's state, test that it answers, flush its cache and end calls."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.ids import RequestId
from rota.core.request import Request, SamplingParams
from rota.runtime.service import ServicePhase
from rota.server.access.audit import audited
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.answers.respond import respond
from rota.server.calls.fields import Fields, read_body
from rota.server.context import AppContext
from rota.server.docs import gives, takes
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

# A token may wait for a long step and for other requests. After this time it will hardly come.
PROBE_S = 20.0


class AbortFields(Fields):
    """Which calls to end: one by its name, or all calls of the key."""

    rid: str | None = None
    abort_all: bool | None = None


def install(app: FastAPI, context: AppContext, probe_s: float = PROBE_S) -> None:
    _install_generate(app, context)
    _install_health_probe(app, context, probe_s)
    _install_model_info(app, context)
    _install_flush_cache(app, context)
    _install_abort(app, context)


def _install_generate(app: FastAPI, context: AppContext) -> None:
    @app.post("/generate", openapi_extra=takes(GenerateFields), responses=gives(GenerateBody, GeneratedBody))
    async def generate(http: HttpRequest) -> Response:
        """Continue prompts, in SGLang's shape: one object, or a list of them for a list of prompts."""
        return await respond(context, http, read_generate, GenerateWriter)


def _install_health_probe(app: FastAPI, context: AppContext, probe_s: float) -> None:
    @app.get("/health_generate", responses=gives(HealthBody))
    async def health_generate(http: HttpRequest) -> Response:
        """200 if a token comes in time."""
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


def _install_model_info(app: FastAPI, context: AppContext) -> None:
    @app.get("/model_info", responses=gives(ModelInfoBody))
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info(http: HttpRequest) -> dict[str, Any]:
        """Which model is served, and how long its sequences may be. Only operators see its folder."""
        base, capacity = context.registry.base, context.service.state.capacity
        path = path_for(context.access.key_of(http), base)
        return {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": base.name,
            "is_generation": True,
            "context_length": capacity and capacity.max_sequence_tokens,
            "preferred_sampling_params": None,
        }


def _install_flush_cache(app: FastAPI, context: AppContext) -> None:
    @app.post("/flush_cache", response_class=PlainTextResponse)
    @app.get("/flush_cache", include_in_schema=False)
    async def flush_cache(http: HttpRequest) -> PlainTextResponse:
        """Drop the KV of earlier prompts. KV that is in use stays."""
        with audited(http, context.access.key_of(http), "flush_cache") as details:
            context.access.operator_of(http)
            flushed = await context.queries.flush_cache()
            if flushed is None:
                raise RequestError(Fault(FaultCode.ENGINE_DIED, "An engine does not answer; its cache is unchanged."))
            details["blocks"] = flushed.blocks
        return PlainTextResponse(f"The cache is flushed: {flushed.blocks} blocks were dropped.\n")


def _install_abort(app: FastAPI, context: AppContext) -> None:
    @app.post("/abort_request", openapi_extra=takes(AbortFields), responses=gives(AbortedBody))
    async def abort_request(http: HttpRequest) -> dict[str, int]:
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
        return {"aborted": len(own)}


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
