"""A request that ended becomes spans with the times and reasons of its events."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from rota.core.errors import ConfigError, Fault, FaultCode
from rota.core.events import Admitted, Finished, FinishReason, Preempted, Produced
from rota.observe.metrics import Metrics
from rota.observe.trace_export import exported_traces
from rota.observe.traces import Traces
from rota.runtime.lifeline import tied

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """Metrics whose requests are traced, and the spans that came of them, by name."""

    def __init__(self, **provider) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(**provider)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.metrics = Metrics(lambda _: "pirate", on_end=Traces(self._provider.get_tracer("test")).end)

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}


def ask(metrics: Metrics, *events, begin: float = 0.0, trace=()) -> None:
    metrics.asked("r1", 1, begin)
    metrics.owned(["r1"], "acme", "my call", trace=trace)
    metrics.observe(events)


def finished(at: float, **fields) -> Finished:
    return Finished(request_id="r1", at=at, reason=FinishReason.LENGTH, prompt_tokens=40, cached_tokens=16, **fields)


def seconds(span) -> float:
    return round((span.end_time - span.start_time) / 1e9, 3)


def test_a_request_has_spans_for_queue_prefill_and_decode():
    traced = Traced()
    now = time.monotonic()
    ask(
        traced.metrics,
        Admitted(request_id="r1", at=now - 3.0, cached_tokens=16, reasons=("no KV", "its adapter has no slot")),
        Preempted("r1", now - 2.9),
        Produced(at=now - 1.0, request_ids=("r1",), tokens=(7,)),
        Produced(at=now - 0.5, request_ids=("r1",), tokens=(8,)),
        finished(now - 0.5),
        begin=now - 4.0,
    )

    spans = traced.spans
    assert {name: seconds(span) for name, span in spans.items()} == {
        "request": 3.5,
        "queue": 1.0,
        "prefill": 2.0,
        "decode": 0.5,
    }
    assert abs(spans["request"].end_time / 1e9 - time.time()) < 60.0
    assert dict(spans["request"].attributes) == {
        "rota.request": "r1",
        "rota.call": "my call",
        "rota.key": "acme",
        "rota.adapter": "pirate",
        "rota.finish": "length",
        "rota.preemptions": 1,
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 2,
    }
    assert spans["queue"].attributes["rota.waited_for"] == ("no KV", "its adapter has no slot")
    assert spans["prefill"].attributes["rota.cached_tokens"] == 16
    whole = spans["request"].context.span_id
    assert {span.parent.span_id for name, span in spans.items() if name != "request"} == {whole}


def test_a_clients_trace_is_continued():
    traced = Traced()
    ask(traced.metrics, finished(1.0), trace=(("traceparent", PARENT), ("tracestate", "vendor=1")))

    whole = traced.spans["request"]
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    assert whole.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_header_that_is_no_trace_begins_a_new_one(header):
    traced = Traced()
    ask(traced.metrics, finished(1.0), trace=(("traceparent", header),))

    assert traced.spans["request"].parent is None


def test_a_client_that_samples_no_trace_gets_none():
    traced = Traced()
    ask(traced.metrics, finished(1.0), trace=(("traceparent", PARENT[:-1] + "0"),))

    assert not traced.spans


def test_a_request_that_never_started_has_only_a_queue_and_its_fault():
    traced = Traced()
    fault = Fault(FaultCode.ENGINE_DIED, "The engine died.")
    ask(traced.metrics, Finished(request_id="r1", at=2.0, reason=FinishReason.FAILED, fault=fault))

    assert {name: seconds(span) for name, span in traced.spans.items()} == {"request": 2.0, "queue": 2.0}
    whole = traced.spans["request"]
    assert whole.attributes["rota.fault"] == "engine_died"
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "The engine died.")


def test_a_sampler_leaves_requests_out():
    traced = Traced(sampler=ALWAYS_OFF)
    ask(traced.metrics, finished(1.0))

    assert not traced.spans


def test_traces_that_are_off_import_nothing_and_tell_nothing():
    script = """
import sys
from rota.observe.trace_export import exported_traces
with exported_traces(False) as enders:
    print(len(enders), any(name.startswith("opentelemetry") for name in sys.modules))
"""
    done = subprocess.run(tied([sys.executable, "-c", script]), capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["0", "False"]


def test_traces_without_their_packages_are_refused_with_the_command_that_helps(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'opentelemetry-api[<>=.,0-9]+' 'opentelemetry-exporter"),
        exported_traces(True),
    ):
        pass


def test_a_protocol_that_is_not_spoken_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc"), exported_traces(True):
        pass


def test_spans_reach_the_collector_that_the_environment_names(monkeypatch):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with exported_traces(True) as on_finish:
            metrics = Metrics(lambda _: "pirate", on_end=on_finish[0])
            ask(metrics, finished(1.0))
        collector.shutdown()

    assert [path for path, _ in received] == ["/v1/traces"]
    (sent,) = ExportTraceServiceRequest.FromString(received[0][1]).resource_spans
    resource = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert (resource["service.name"], resource["deployment.environment"]) == ("rota", "test")
    assert {span.name for span in sent.scope_spans[0].spans} == {"request", "queue"}
