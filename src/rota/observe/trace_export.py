"""Trace export sends spans to an OpenTelemetry collector, as the OTEL_* variables say."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rota.core.errors import ConfigError
from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.observe.journey import Journey, OnEnd

# ── aside ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Work on the side is done by a thread of its own, so that the event loop does not wait for it.

# Ends that may wait. A thread that falls behind so far misses some.
MOST_WAITING = 10_000


class Aside:
    """Tells `on_end` of every end, a little later and in the same order."""

    def __init__(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._waiting: queue.Queue[tuple[RequestId, Journey, Finished] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="rota-traces", daemon=True)
        self._thread.start()

    def end(self, request_id: RequestId, journey: Journey, ending: Finished) -> None:
        """Does not wait: an end that finds no place is dropped."""
        with suppress(queue.Full):
            self._waiting.put_nowait((request_id, journey, ending))

    def close(self) -> None:
        """Wait until all ends have been told."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while ended := self._waiting.get():
            self._on_end(*ended)


# ── traces ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Traces turn every request that ended into spans: the request, its wait in the queue, its prefill and its decode.
#
# A span is made when its request has ended, with the times that the request's events had. So no token waits for a
# trace. Only OpenTelemetry's API is needed here; `trace_export` has the SDK.

Attributes = dict[str, Any]


class Traces:
    """`end` is told of every request's end."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    def end(self, request_id: RequestId, journey: Journey, ending: Finished) -> None:
        """Write the spans of one request, as part of its client's trace if the client sent one."""
        at = _unix_times()
        whole = self._tracer.start_span(
            "request",
            context=self._propagator.extract(dict(journey.trace)),
            kind=SpanKind.SERVER,
            attributes=_attributes(request_id, journey, ending),
            start_time=at(journey.asked_at),
        )
        if whole.is_recording():  # otherwise the sampler left it out
            inside = trace.set_span_in_context(whole)
            for name, begin, end, attributes in _parts(journey, ending):
                span = self._tracer.start_span(name, context=inside, attributes=attributes, start_time=at(begin))
                span.end(at(end))
            if ending.fault:
                whole.set_status(Status(StatusCode.ERROR, ending.fault.message))
        whole.end(at(ending.at))


def _attributes(request_id: RequestId, journey: Journey, ending: Finished) -> Attributes:
    attributes: Attributes = {
        "rota.request": request_id,
        "rota.call": journey.call,
        "rota.key": journey.owner,
        "rota.adapter": journey.label,
        "rota.finish": ending.reason.value,
        "rota.preemptions": journey.preemptions,
        "gen_ai.usage.input_tokens": ending.prompt_tokens,
        "gen_ai.usage.output_tokens": journey.tokens,
    }
    return attributes | ({"rota.fault": ending.fault.code.value} if ending.fault else {})


def _parts(journey: Journey, ending: Finished) -> Iterator[tuple[str, float, float, Attributes]]:
    """Each part that the request reached. The last one lasts until the end."""
    adapter = {"rota.adapter": journey.label}
    admitted_at, first_at = journey.admitted_at, journey.first_at
    queued_until = ending.at if admitted_at is None else admitted_at
    yield "queue", journey.asked_at, queued_until, adapter | {"rota.waited_for": journey.reasons}
    if admitted_at is not None:
        cached = {"rota.cached_tokens": ending.cached_tokens}
        yield "prefill", admitted_at, ending.at if first_at is None else first_at, adapter | cached
    if first_at is not None:
        yield "decode", first_at, ending.at, adapter | {"gen_ai.usage.output_tokens": journey.tokens}


def _unix_times() -> Callable[[float], int]:
    """Turns an event's time into nanoseconds since 1970. Events have the time of a clock that never goes back."""
    shift_s = time.time() - time.monotonic()
    return lambda at: int((at + shift_s) * 1e9)


# How long the last spans may take to be sent when the server stops.
SEND_S = 5.0
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def exported_traces(is_on: bool, version: str = "") -> Iterator[list[OnEnd]]:
    """What must be told of every request's end: nothing, or a trace. Spans that wait are sent at the end.

    Raises ConfigError without the packages of rota[otel]. They are imported only if traces are on.
    """
    if not is_on:
        yield []
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from rota.observe.trace_export import Traces
    except ImportError as error:
        raise ConfigError(f"--otel needs OpenTelemetry ({error}); pip install 'rota[otel]'.") from error
    _check_protocol()
    own = Resource({"service.name": "rota", "service.version": version})
    resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def finish() -> None:
        aside.close()
        provider.shutdown()

    aside = Aside(Traces(provider.get_tracer("rota", version)).end)
    try:
        yield [aside.end]
    finally:
        _within(SEND_S, finish)


def _within(time_s: float, act: Callable[[], object]) -> None:
    """Do it, but wait no longer: with a collector that is gone the SDK would take half a minute."""
    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    acting.join(time_s)


def _check_protocol() -> None:
    for name in _PROTOCOLS:
        if (protocol := os.environ.get(name, "http/protobuf")) != "http/protobuf":
            raise ConfigError(f"{name} is {protocol}, but traces are sent by http/protobuf; unset it.")
