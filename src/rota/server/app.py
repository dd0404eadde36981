"""The application connects the service, the routes and the observers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rota.core.config import SchedulerConfig, ServerConfig
from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.extensions import DIALECTS, found
from rota.observe.journey import Journey, OnEnd
from rota.observe.metrics import Metrics
from rota.observe.observer import Observer
from rota.observe.request_log import log_end, log_engines
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.runtime.spool import Spool
from rota.server.access.access import Access
from rota.server.adapters.listing import History, Listing
from rota.server.adapters.manager import TIMEOUT_S, AdapterManager
from rota.server.adapters.routes import install_adapter_routes
from rota.server.adapters.updates import Updates
from rota.server.adapters.version_routes import install_version_routes
from rota.server.answers.respond import VERSION_HEADER as VERSION
from rota.server.call import HEADER as NAME
from rota.server.calls.reading_room import ReadingRoom
from rota.server.context import AppContext
from rota.server.docs import ERROR_RESPONSES, install_docs_page, install_openapi
from rota.server.door.body_limit import BodyLimit
from rota.server.errors import OnError, OwnBody, install_error_handlers, unheard
from rota.server.info import install_model_routes, install_probes, install_server_info
from rota.server.metrics import Counts, Scrapes, install_metrics_route, metrics_app
from rota.server.open_answers import OpenAnswer, OpenAnswers
from rota.server.openai.chat import install_chat_route
from rota.server.openai.completions import install_completions_route
from rota.server.openai.tokenize_routes import install_tokenize_routes
from rota.server.operator_routes import RequestsRoute, install_pause_routes, install_quarantine_routes, quarantine_log
from rota.server.queries import Pausing, Queries
from rota.server.resolver import HERE, NameLookup
from rota.server.streams import CallReply, Observers, Streams
from rota.server.traffic.routes import first_routes, install_traffic_routes
from rota.server.traffic.traffic import Shadows, Traffic
from rota.text.speech import ParserNames
from rota.text.tokenizer import Tokenizer

# ── browsers ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Browsers let a page of another site read answers, and send more than a form could, if the server says so (CORS).

METHODS = ("GET", "POST", "PUT", "DELETE")
# Of an answer's headers, those that a page may read besides the few that every page may.
SHOWN = (NAME, VERSION, "Retry-After")


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


ServiceTask = Callable[[], Coroutine[Any, Any, None]]


def create_app(
    service: Service,
    tokenizer: Tokenizer,
    registry: Registry,
    unload_timeout_s: float = TIMEOUT_S,
    access: Access | None = None,
    config: ServerConfig | None = None,
    watchers: Sequence[Observer] = (),
    scheduler: SchedulerConfig | None = None,
    on_finish: Sequence[OnEnd] = (),
    service_tasks: Sequence[ServiceTask] = (),
    has_grammars: bool = False,
    on_error: OnError = unheard,
    elsewhere: NameLookup = HERE,
) -> FastAPI:
    """An application that starts and stops the service with itself.

    `watchers` are further observers. `on_finish` are told of every request's end, as the request log is.
    `service_tasks` run beside the service, and are cancelled when it stops. Unless it `has_grammars`, requests with one
    are refused. `on_error` hears of every error that a client is told. `elsewhere` are adapters in sources.
    """
    config, access = config or ServerConfig(), access or Access(registry)
    traffic = _traffic(service, registry, config, access, lambda request: streams.open([request]))
    metrics = _metrics(service, registry, config, _each(log_end, traffic.ended, *on_finish), traffic)
    access.admission.watch(metrics.limit_met)
    adapters = AdapterManager(service, registry, unload_timeout_s, elsewhere.locate, config.reload_changed)
    answers, spool = OpenAnswers(partial(_note, metrics, traffic.shadows)), Spool()
    history, queries, counts, pausing = History(registry), Queries(service), Counts(service), Pausing(service, answers)
    heard = history, adapters, traffic, queries, counts, pausing, quarantine_log(access.blame, metrics)
    # Observers get requests and events; listeners get events only.
    streams = Streams(service, Observers([metrics, *watchers], [*(one.observe for one in heard), log_engines]))
    context = AppContext(
        service,
        streams,
        tokenizer,
        registry,
        access,
        answers,
        pausing,
        queries,
        config.stream_keep_alive,
        config.request_timeout,
        scheduler.max_queued_requests if scheduler else None,
        ReadingRoom(tokenizer.folder, has_grammars),
        has_grammars,
        parsers=ParserNames(config.tool_call_parser, config.reasoning_parser),
        on_error=on_error,
        traffic=traffic,
        resolver=elsewhere.resolver(registry, adapters.load, access.adapter_roots),
    )
    app = _application(context, config, service_tasks, spool.close)
    app.state.connections, app.state.traffic = metrics.connections, traffic  # for the listener, and the dashboard
    install_error_handlers(app, access.shown, _errors_of_dialects(), on_error)
    scrapes = Scrapes(metrics, service, counts, for_picker=config.picker_metrics)
    app.state.metrics_app = metrics_app(scrapes, context, config)  # for a second port
    install_traffic_routes(app, traffic, adapters, registry, access)  # first: a name may have slashes
    _install_routes(app, context, adapters, history, spool, metrics)
    install_metrics_route(app, scrapes, access)
    return app


def _dialects() -> list[ModuleType]:
    return [face for name in DIALECTS if (face := found(name))]


def _errors_of_dialects() -> dict[str, OwnBody]:
    """Who writes the errors of the paths that begin so."""
    return {path: write for face in _dialects() for path, write in getattr(face, "ERRORS", {}).items()}


def _traffic(
    service: Service, registry: Registry, config: ServerConfig, access: Access, send: Callable[[Request], CallReply]
) -> Traffic:
    shadows, first = Shadows(send, lambda: _rows_of(service)), first_routes(config.lora_routes, registry)
    return Traffic(registry, shadows, first=first, is_open_to=access.is_open_to)


def _metrics(
    service: Service,
    registry: Registry,
    config: ServerConfig,
    on_end: OnEnd,
    traffic: Traffic,
) -> Metrics:
    engines = [engine.engine_id for engine in service.state.engines]
    most_adapters, most_keys = config.metrics_max_adapters, config.metrics_max_keys
    return Metrics(registry.name_of, most_adapters, on_end, most_keys, engines, traffic.meters)


def _application(
    context: AppContext, config: ServerConfig, service_tasks: Sequence[ServiceTask], on_stop: Callable[[], None]
) -> FastAPI:
    app = BrowsersApp(
        context.access.allowed_origins,
        title="Rota",
        lifespan=_lifespan(context, service_tasks, on_stop),
        dependencies=[Depends(context.access.guard)],
        responses=ERROR_RESPONSES,
        docs_url=None,
        redoc_url=None,
    )
    most, most_weights = config.max_body_mb * 2**20, config.max_adapter_body_mb * 2**20
    app.add_middleware(BodyLimit, max_bytes=most, max_weights_bytes=most_weights)
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
    context: AppContext, service_tasks: Sequence[ServiceTask], on_stop: Callable[[], None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.streams.start()
        if context.room and context.has_grammars:
            context.room.start()
        warm_up = asyncio.create_task(asyncio.to_thread(context.tokenizer.warm_up))
        beside = [asyncio.create_task(run()) for run in service_tasks]
        yield
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        if context.room:
            await context.room.close()
        await asyncio.to_thread(context.service.stop)
        on_stop()
        await warm_up

    return lifespan


def _install_routes(
    app: FastAPI,
    context: AppContext,
    adapters: AdapterManager,
    history: History,
    spool: Spool,
    metrics: Metrics,
) -> None:
    service, registry, access, queries = context.service, context.registry, context.access, context.queries
    updates, listing = Updates(adapters, registry, access, spool), Listing(registry, adapters, history, spool)
    install_quarantine_routes(app, access)
    install_completions_route(app, context)
    install_chat_route(app, context)
    install_tokenize_routes(app, context)
    install_model_routes(app, context)
    install_adapter_routes(app, adapters, access, updates)
    install_version_routes(app, updates, registry, access, listing)
    install_server_info(app, context, queries, metrics)
    install_pause_routes(app, context, queries)
    RequestsRoute(service, registry, access, context.answers, metrics, queries).install(app)
    for dialect in _dialects():
        dialect.install(app, context)
    install_openapi(app)
    install_docs_page(app)
    install_probes(app, context)
