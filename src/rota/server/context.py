"""The front holds what every route needs: the service and its streams, names, keys and open answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastapi import Request as HttpRequest

from rota.core.errors import RequestError
from rota.observe.journey import TraceHeaders
from rota.runtime.registry import Registry
from rota.runtime.service import Service
from rota.server.access.access import Access
from rota.server.access.audit import client_of
from rota.server.access.keys import Key
from rota.server.call import checked_name, keep_name, name_in
from rota.server.calls.call import Call, ModelNames
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.calls.reading_room import Read, ReadingRoom, Work, read
from rota.server.errors import OnError, unheard
from rota.server.open_answers import CallIdentity, OpenAnswers
from rota.server.queries import Pausing, Queries
from rota.server.resolver import Resolver
from rota.server.streams import Streams
from rota.server.traffic.route import Chosen
from rota.server.traffic.traffic import Traffic
from rota.text.speech import AS_THE_TEMPLATE_SAYS, ParserNames
from rota.text.tokenizer import Tokenizer

# ── trace headers ───────────────────────────────────────────────────────────────────────────────────────────────────
# Trace headers say which trace a call is a part of.


def trace_in(http: HttpRequest) -> TraceHeaders:
    """The W3C headers of a call; tracestate means nothing without traceparent."""
    if "traceparent" not in http.headers:
        return ()
    return tuple((name, http.headers[name]) for name in ("traceparent", "tracestate") if name in http.headers)


# ── gateway headers ─────────────────────────────────────────────────────────────────────────────────────────────────
# Gateway headers say for whom a request is, and how soon its first token is wanted, if the key may set them.
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


@dataclass(frozen=True, slots=True)
class AppContext:
    """Made once, together with the application."""

    service: Service
    streams: Streams
    tokenizer: Tokenizer
    registry: Registry
    access: Access
    answers: OpenAnswers
    pausing: Pausing
    queries: Queries
    keep_alive_s: float
    request_timeout_s: float | None = None
    # Every request waits in the queue, at least until the next step. None: no limit.
    max_queued_requests: int | None = None
    # Reads large bodies, and tries grammars. None: threads read bodies, and requests with a grammar are refused.
    room: ReadingRoom | None = None
    has_grammars: bool = False
    # Which parsers read the model's answers.
    parsers: ParserNames = AS_THE_TEMPLATE_SAYS
    # Loads adapters that a body names and the server was not told of. None: such names are refused.
    resolver: Resolver | None = None
    # Hears of the errors that end streams.
    on_error: OnError = unheard
    # Where the requests of a name go. None: to its current version.
    traffic: Traffic | None = None

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
        if self.traffic and not is_one_version:
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
        limits = TextLimits(capacity.max_sequence_tokens if capacity else None, self.max_queued_requests)
        texts = Texts(self.tokenizer, limits, self.parsers)
        result = await read(texts, self.room, key, work, await http.body())
        if self.resolver is not None:
            for param, model in dict.fromkeys(result.asked_models):
                await self.resolver.resolve(key, model, param, client_of(http))
        return result
