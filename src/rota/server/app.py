"""The application: middleware, the table of routes, and what a server is put together from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rota.core.events import Finished
from rota.core.ids import EngineId, RequestId
from rota.extensions import DIALECTS, found
from rota.observe.journey import Journey, OnEnd
from rota.observe.metrics import Metrics
from rota.observe.request_log import log_end, log_engines, log_shortage
from rota.observe.slot_pressure import SlotPressure
from rota.runtime.service import Service
from rota.runtime.spool import Spool
from rota.server.access.access import Access, Right
from rota.server.access.audit import QuarantineLog
from rota.server.access.exposure import is_loopback
from rota.server.adapters.listing import AdapterBody, AdaptersListBody, Listing
from rota.server.adapters.manager import AdapterManager
from rota.server.adapters.resolver import Resolver
from rota.server.adapters.updates import RemovedBody, UpdatedBody, UpdateFields, Updates
from rota.server.adapters.upload import TensorsFields
from rota.server.answers.respond import IGNORED_HEADER as IGNORED
from rota.server.answers.respond import VERSION_HEADER as VERSION
from rota.server.call import HEADER as NAME
from rota.server.calls.reading_room import ReadingRoom
from rota.server.context import AppContext, AppParts
from rota.server.docs import ERROR_RESPONSES, install_docs_page, install_openapi
from rota.server.door.body_limit import BodyLimit
from rota.server.door.plain_paths import PlainPaths
from rota.server.errors import install_error_handlers
from rota.server.metrics import Scrapes
from rota.server.open_answers import OpenAnswer, OpenAnswers
from rota.server.openai.chat import chat_completions
from rota.server.openai.chat_fields import ChatFields
from rota.server.openai.completions import CompletionFields, completions
from rota.server.openai.tokenize_routes import (
    DetokenizeBody,
    DetokenizeFields,
    TokenizeBody,
    TokenizeFields,
    TokenizerInfoBody,
    detokenize,
    tokenize,
    tokenizer_info,
)
from rota.server.openai.writer import ChatBody, ChatChunkBody, CompletionBody
from rota.server.queries import Pausing, Queries
from rota.server.route import HttpRoute, add_routes, delete, get, post, put
from rota.server.routes import adapters, info, operators, traffic
from rota.server.routes.adapters import AdaptersBody, LoadFields, NativeLoadFields, NativeUnloadFields, UnloadFields
from rota.server.routes.operators import IsPausedBody, LiftedBody, PausedBody, QuarantineBody, WorldSizeBody
from rota.server.routes.traffic import RouteBody, RouteFields, RoutesBody
from rota.server.streams import Observers, Streams
from rota.server.traffic.traffic import Shadows, Traffic

# ── routes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Which routes there are, who may call them, which function answers, what it takes, gives, and streams.

# The first route that fits a path gets the call, and an adapter's name may have slashes.
_NAMED, _ROUTE_OF = "/v1/adapters/{name:path}", "/v1/adapters/{name:path}/route"
_QUARANTINE = "/v1/quarantine"
METRICS = get("/metrics", Right.OPERATE, info.scrape, is_text=True)
PROBES = (
    # /ping is what SageMaker asks, and vLLM answers.
    get("/health", Right.NONE, info.healthy, also=("HEAD /health", "GET /ping", "POST /ping")),
    get("/readyz", Right.NONE, info.ready, also=("HEAD /readyz",)),
    get("/livez", Right.NONE, info.live, also=("HEAD /livez",)),
)
ROUTES = (
    put(_ROUTE_OF, Right.LOAD, traffic.set_route, RouteFields, RouteBody),
    get(_ROUTE_OF, Right.LOAD, traffic.show_route, gives=RouteBody),
    get("/v1/routes", Right.ANY, traffic.show_routes, gives=RoutesBody),
    delete(_ROUTE_OF, Right.LOAD, traffic.end_route, gives=RouteBody),
    get(_QUARANTINE, Right.OPERATE, operators.show_quarantine, gives=QuarantineBody),
    delete(_QUARANTINE + "/adapters/{name:path}", Right.OPERATE, operators.lift_quarantine, gives=LiftedBody),
    delete(_QUARANTINE + "/keys/{name}", Right.OPERATE, operators.give_back, gives=LiftedBody),
    post("/v1/completions", Right.MODEL, completions, CompletionFields, CompletionBody, CompletionBody),
    post("/v1/chat/completions", Right.MODEL, chat_completions, ChatFields, ChatBody, ChatChunkBody),
    post("/v1/tokenize", Right.MODEL, tokenize, TokenizeFields, TokenizeBody, also=("POST /tokenize",)),
    post("/v1/detokenize", Right.MODEL, detokenize, DetokenizeFields, DetokenizeBody, also=("POST /detokenize",)),
    get("/tokenizer_info", Right.ANY, tokenizer_info, gives=TokenizerInfoBody),
    get("/v1/models", Right.ANY, info.models, gives=info.ModelsBody),
    get("/v1/models/{name:path}", Right.MODEL, info.model, gives=info.ModelBody),
    post("/v1/load_lora_adapter", Right.LOAD, adapters.load, LoadFields, is_text=True),
    post("/v1/unload_lora_adapter", Right.LOAD, adapters.unload, UnloadFields, is_text=True),
    post("/load_lora_adapter", Right.LOAD, adapters.load_and_list, NativeLoadFields, AdaptersBody),
    post("/unload_lora_adapter", Right.LOAD, adapters.unload_and_list, NativeUnloadFields, AdaptersBody),
    post("/load_lora_adapter_from_tensors", Right.LOAD, adapters.load_tensors_and_list, TensorsFields, AdaptersBody),
    get("/v1/adapters", Right.ANY, adapters.adapters, gives=AdaptersListBody),
    get(_NAMED, Right.MODEL, adapters.adapter, gives=AdapterBody),
    put(_NAMED, Right.LOAD, adapters.update, UpdateFields, UpdatedBody),
    delete(_NAMED, Right.LOAD, adapters.remove, gives=RemovedBody),
    get("/", Right.NONE, info.root, also=("HEAD /",), is_text=True, is_in_schema=False),
    get("/version", Right.ANY, info.version),
    get("/load", Right.OPERATE, info.load),
    get("/server_info", Right.OPERATE, info.server_info, gives=info.ServerInfoBody, also=("GET /get_server_info",)),
    post("/pause", Right.OPERATE, operators.pause, gives=PausedBody),
    post("/resume", Right.OPERATE, operators.resume, gives=PausedBody),
    get("/is_paused", Right.OPERATE, operators.is_paused, gives=IsPausedBody),
    get("/get_world_size", Right.OPERATE, operators.world_size, gives=WorldSizeBody),
    get("/v1/requests/{id}", Right.OWN, operators.explain, gives=operators.CallStanding),
    *PROBES,
    METRICS,
)


def routes_of_dialects() -> list[HttpRoute]:
    """The tables of the dialects that this installation has."""
    return [route for name in DIALECTS if (face := found(name)) for route in face.ROUTES]


# ── browsers ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Browsers let a page of another site read answers, and send more than a form could, if the server says so (CORS).

METHODS = ("GET", "POST", "PUT", "DELETE")
# Of an answer's headers, those that a page may read besides the few that every page may.
SHOWN = (NAME, VERSION, IGNORED, "Retry-After")


class BrowsersApp(FastAPI):
    """An application that tells browsers whose pages may use it. Who may ask is decided by `Access` alone.

    Browsers are never told to send cookies or passwords of their own: keys come in headers that a page must know.
    """

    def __init__(self, allowed_origins: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._allowed_origins = allowed_origins

    def build_middleware_stack(self) -> ASGIApp:
        """Around all else: without the headers a browser would hide from its page why an answer is 500."""
        stack = super().build_middleware_stack()
        if not self._allowed_origins:
            return stack
        return CORSMiddleware(stack, self._allowed_origins, METHODS, ["*"], expose_headers=SHOWN)


# ── application ─────────────────────────────────────────────────────────────────────────────────────────────────────
# An application starts and stops the service with itself.


def create_app(parts: AppParts, routes: Iterable[HttpRoute]) -> FastAPI:
    """An application of these routes. It starts and stops the service with itself."""
    service, registry, config, access = parts.service, parts.registry, parts.config, parts.access
    shadows = Shadows(lambda request: streams.open([request]), lambda: _rows_of(service))
    first = traffic.first_routes(config.lora_routes, registry)
    split = Traffic(registry, shadows, first=first, is_open_to=access.is_open_to)
    pressure = SlotPressure(partial(_slots_of, service), log_shortage)
    metrics = _metrics(parts, split, pressure)
    manager = AdapterManager(service, registry, parts.unload_timeout_s, parts.locate, config.reload_changed)
    split.tie(manager)
    answers, spool = OpenAnswers(partial(_note, metrics, shadows)), Spool()
    queries, pausing, listing = Queries(service), Pausing(service, answers), Listing(registry, manager, spool)
    heard = listing, manager, split, queries, pausing, QuarantineLog(access.blame)
    # Observers get requests and events; listeners get events only.
    streams = Streams(
        service, Observers([metrics, pressure, *parts.watchers], [*(one.observe for one in heard), log_engines])
    )
    prefix, roots = parts.prefix, access.adapter_roots
    context = AppContext(
        **{one.name: getattr(parts, one.name) for one in fields(parts)},
        streams=streams,
        answers=answers,
        pausing=pausing,
        queries=queries,
        metrics=metrics,
        pressure=pressure,
        scrapes=Scrapes(metrics, service, queries, for_picker=config.picker_metrics),
        adapters=manager,
        updates=Updates(manager, registry, access, spool),
        listing=listing,
        traffic=split,
        room=ReadingRoom(parts.tokenizer.folder, parts.has_grammars),
        resolver=None if prefix is None else Resolver(prefix, registry, manager.load, roots),
    )
    app = _application(context, routes, spool.close)
    # For the listener: the meters of its connections, and what a second port serves.
    app.state.connections, app.state.metrics_app = metrics.connections, _metrics_app(context)
    app.state.context = context
    return app


def _slots_of(service: Service, engine_id: EngineId) -> tuple[int, int]:
    """How many slots an engine has, and the bytes of one more; it has none while it is down."""
    found = next((one.capacity for one in service.state.engines if one.engine_id == engine_id), None)
    return (found.slots, found.slot_bytes) if found else (0, 0)


def _metrics(parts: AppParts, split: Traffic, pressure: SlotPressure) -> Metrics:
    config, blame = parts.config, parts.access.blame
    metrics = Metrics(
        parts.registry.name_of,
        config.metrics_max_adapters,
        _each(log_end, split.ended, *parts.on_finish),
        config.metrics_max_keys,
        [engine.engine_id for engine in parts.service.state.engines],
        split.meters,
        parts.engine.policy.reader_pace,
    )
    metrics.quarantined = lambda: len(blame.quarantines)
    metrics.shortages = lambda: pressure.shortages(time.monotonic())
    parts.access.admission.watch(metrics.limit_met)
    return metrics


def _application(context: AppContext, routes: Iterable[HttpRoute], on_stop: Callable[[], None]) -> FastAPI:
    app = BrowsersApp(
        context.access.allowed_origins,
        title="Rota",
        lifespan=_lifespan(context, on_stop),
        responses=ERROR_RESPONSES,
        docs_url=None,
        redoc_url=None,
    )
    most, most_weights = context.config.max_body_mb * 2**20, context.config.max_adapter_body_mb * 2**20
    app.add_middleware(BodyLimit, max_bytes=most, max_weights_bytes=most_weights)
    app.add_middleware(PlainPaths)  # around the limit, which looks at paths
    # Who writes the errors of the paths that begin so.
    faces = [face for name in DIALECTS if (face := found(name))]
    errors = {path: write for face in faces for path, write in getattr(face, "ERRORS", {}).items()}
    install_error_handlers(app, context.access.shown, errors, context.on_error)
    add_routes(app, routes, context, context.access)
    install_openapi(app)
    install_docs_page(app)
    return app


# No route of the second port reads a body.
MOST_METRICS_BODY_BYTES = 65_536


def _metrics_app(context: AppContext) -> FastAPI:
    """GET /metrics and the probes, for clients without a key; web pages are kept away as from a server without keys."""
    host = context.config.metrics_host
    access = Access(context.registry, own_name=host if is_loopback(host) else None)
    app = FastAPI(title="Rota", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=MOST_METRICS_BODY_BYTES)
    install_error_handlers(app)
    add_routes(app, [METRICS, *PROBES], context, access)
    return app


def _note(metrics: Metrics, shadows: Shadows, answer: OpenAnswer) -> None:
    """An answer has been opened: who asked, which traffic route chose its adapter, and who gets a copy."""
    key, request_ids = answer.caller.key, (request.request_id for request in answer.requests)
    metrics.owned(request_ids, key.name, answer.caller.name, key.tenant.name, answer.caller.trace)
    for request, chosen in zip(answer.requests, answer.chosen, strict=True):
        if chosen.target:
            metrics.routed([request.request_id], chosen.name, chosen.target)
        if chosen.shadow:
            shadows.copy([request], chosen.shadow)


def _rows_of(service: Service) -> int:
    return sum(engine.capacity.rows for engine in service.state.engines if engine.capacity)


def _each(*on_finish: OnEnd) -> OnEnd:
    def end(request_id: RequestId, journey: Journey, ending: Finished) -> None:
        for one in on_finish:
            one(request_id, journey, ending)

    return end


def _lifespan(
    context: AppContext, on_stop: Callable[[], None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.streams.start()
        if context.has_grammars:
            context.room.start()
        warm_up = asyncio.create_task(asyncio.to_thread(context.tokenizer.warm_up))
        beside = [asyncio.create_task(run()) for run in context.service_tasks]
        yield
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await context.room.close()
        await asyncio.to_thread(context.service.stop)
        on_stop()
        await warm_up

    return lifespan
