"""Traces turn every request that ended into spans: the request, its wait in the queue, its prefill and its decode.

A span is made when its request has ended, with the times that the request's events had. So no token waits for a
trace. Only OpenTelemetry's API is needed here; `trace_export` has the SDK.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.observe.journey import Journey

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
