"""Trace export sends spans to an OpenTelemetry collector, as the OTEL_* variables say."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rota.core.errors import ConfigError
from rota.core.events import Finished
from rota.core.ids import RequestId
from rota.core.version import how_to_install
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


# How long the last spans may take to be sent when the server stops.
SEND_S = 5.0
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def exported_traces(is_on: bool, version: str = "") -> Iterator[list[OnEnd]]:
    """What must be told of every request's end: nothing, or a trace. Spans that wait are sent at the end.

    Raises ConfigError without the packages of the extra `otel`. They are imported only if traces are on.
    """
    if not is_on:
        yield []
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from rota.observe.traces import Traces
    except ImportError as error:
        raise ConfigError(f"--otel needs OpenTelemetry ({error}); {how_to_install('otel')}.") from error
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
