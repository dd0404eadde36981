"""Trace export sends spans to an OpenTelemetry collector, as the OTEL_* variables say."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rota.core.errors import ConfigError
from rota.observe.aside import Aside
from rota.observe.journey import OnEnd

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

        from rota.observe.traces import Traces
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
