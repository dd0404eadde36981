"""The context holds what every route needs: the service and its streams, names, keys and open answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest

from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import RequestError
from rota.observe.journey import OnEnd, TraceHeaders
from rota.observe.metrics import Metrics
from rota.observe.observer import Observer
from rota.observe.slot_pressure import SlotPressure
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.access.audit import client_of
from rota.server.access.keys import Key
from rota.server.adapters.listing import Listing
from rota.server.adapters.manager import TIMEOUT_S, AdapterManager, Locate, as_asked
from rota.server.adapters.resolver import Resolver
from rota.server.adapters.updates import Updates
from rota.server.call import checked_name, keep_name, name_in
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.known_fields import UnknownFields
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.calls.reading_room import Read, ReadingRoom, Work, read
from rota.server.errors import OnError, unheard
from rota.server.metrics import Scrapes
from rota.server.open_answers import CallIdentity, OpenAnswers
from rota.server.queries import Pausing, Queries
from rota.server.streams import Streams
from rota.server.traffic.route import Chosen
from rota.server.traffic.traffic import Traffic
from rota.sources.prefix import Prefix
from rota.text.speech import ParserNames
from rota.text.tokenizer import Tokenizer

# ── trace headers ───────────────────────────────────────────────────────────────────────────────────────────────────
# Trace headers say which trace a call is a part of.


def trace_in(http: HttpRequest) -> TraceHeaders:
    """The W3C headers of a call; tracestate means nothing without traceparent."""
    if "traceparent" not in http.headers:
        return ()
    return tuple((name, http.headers[name]) for name in ("traceparent", "tracestate") if name in http.headers)


# ── gateway headers ─────────────────────────────────────────────────────────────────────────────────────────────────
# Gateway headers say which tenant a request is for, and how soon its first token is wanted, if the key may set them.
#
# Their names are llm-d's. A gateway hands on what its clients sent, so the headers of another key mean nothing.

FAIRNESS_ID = "x-llm-d-inference-fairness-id"
TTFT_MS = "x-llm-d-slo-ttft-ms"


def gateway_tenant(http: HttpRequest, key: Key) -> Key:
    """The key, with the tenant that the call names. Raises RequestError for a name that a label cannot hold."""
    given = http.headers.get(FAIRNESS_ID)
    if given is None or not key.may_set_headers:
        return key
    return key.on_behalf_of(checked_name(FAIRNESS_ID, given))


def first_token_in(http: HttpRequest, key: Key) -> float | None:
    """The seconds in which a call wants its first token. Raises RequestError if the header is not a number above 0."""
    given = http.headers.get(TTFT_MS)
    if given is None or not key.may_set_headers:
        return None
    try:
        wanted_ms = float(given)
    except ValueError:
        wanted_ms = math.nan
    if not 0.0 < wanted_ms < math.inf:
        raise RequestError.bad_field(TTFT_MS, f"{TTFT_MS} must be milliseconds above 0, not {given[:200]!r}.")
    return wanted_ms / 1000.0


# ── context ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The parts are what an application is made from; its context has them, and what it made of them.

# Runs beside the service, and is cancelled when that stops.
ServiceTask = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """What the commands build before there is an application."""

    service: Service
    tokenizer: Tokenizer
    registry: Registry
    access: Access
    config: ServerConfig
    engine: EngineConfig
    locate: Locate = as_asked  # where the addresses of adapters lie
    prefix: Prefix | None = None  # below it lie adapters that requests may name; None: they name those that are loaded
    watchers: Sequence[Observer] = ()  # observers beside the metrics
    on_finish: Sequence[OnEnd] = ()  # hear of every request's end, as the request log does
    on_error: OnError = unheard  # hears of every error that a client is told
    service_tasks: Sequence[ServiceTask] = ()
    has_grammars: bool = True  # False: requests with a grammar are refused
    unload_timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext(AppParts):
    """What every route gets. Made once, together with the application."""

    streams: Streams
    answers: OpenAnswers
    pausing: Pausing
    queries: Queries
    metrics: Metrics
    scrapes: Scrapes
    pressure: SlotPressure
    adapters: AdapterManager
    updates: Updates
    listing: Listing
    traffic: Traffic
    room: ReadingRoom  # reads large bodies, and tries grammars
    resolver: Resolver | None

    def identify(self, http: HttpRequest) -> CallIdentity:
        """The caller of a route that generates. Raises RequestError for a wrong key, or one that used up its minute."""
        key = self.enter(http)
        return CallIdentity(gateway_tenant(http, key), name_in(http), trace_in(http), first_token_in(http, key))

    def named(self, http: HttpRequest, caller: CallIdentity, call: Call) -> CallIdentity:
        """The caller under the name that the body gives the call. Raises RequestError for a bad name."""
        if call.name is None:
            return caller
        return replace(caller, name=keep_name(http, checked_name(call.name_param, call.name)))

    def choose(self, key: Key, names: ModelNames, asker: str | None) -> Chosen:
        """Who answers a call. Every route that generates asks here.

        A key needs the right to use the name, and not each target of the name's traffic route. Raises RequestError for
        a name that is not known, that the key may not use, or whose adapter is lost, and for two that disagree.
        """
        model = names.lora_path or names.model
        if names.lora_path and self.registry.get(names.model) is not self.registry.base:
            adapter = self.access.find(key, names.lora_path, names.param)
            if self.access.find(key, names.model) is not adapter:
                message = f"model and lora_path name two different adapters, '{names.model}' and '{names.lora_path}'."
                raise RequestError.bad_field("lora_path", message)
        named = self.access.named(key, model, names.param)
        chosen = Chosen(named)
        is_one_version = model is not None and model.endswith(named.label)
        if not is_one_version:
            # Two keys may have users of the same name.
            chosen = self.traffic.choose(named, asker and f"{key.name}\0{asker}")
        self.access.refuse_lost(key, chosen.adapter, names.param)
        return chosen

    def enter(self, http: HttpRequest) -> Key:
        """The key of a call to a route with limits, which counts as a request. Raises RequestError as `identify`."""
        key = self.access.key_of(http)
        self.access.admission.enter(key)
        return key

    async def read(self, key: Key, http: HttpRequest, work: Work[Read]) -> Read:
        """What `work` makes of the request's body. Raises RequestError if the body is refused.

        The adapters that it names are loaded first, where names may be resolved.
        """
        capacity = self.service.state.capacity
        most_tokens = capacity.max_sequence_tokens if capacity else None
        # Every request waits in the queue, at least until the next step.
        limits = TextLimits(most_tokens, self.engine.scheduler.max_queued_requests)
        config, parsers = self.config, ParserNames(self.config.tool_call_parser, self.config.reasoning_parser)
        texts = Texts(self.tokenizer, limits, parsers, UnknownFields(config.unknown_fields))
        result = await read(texts, self.room, key, work, await http.body())
        if self.resolver is not None:
            for param, model in dict.fromkeys(result.asked_models):
                await self.resolver.resolve(key, model, param, client_of(http))
        return result
