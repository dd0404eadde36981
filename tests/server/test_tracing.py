"""A call over HTTP is a part of its client's trace."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rota.observe.traces import Traces
from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.letters import serving
from tests.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "Authorization": "Bearer secret", "X-Request-Id": "mine"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "pirate", "prompt": ["abc", "def"], "max_tokens": 3}),
        ("/generate", {"lora_path": "pirate", "text": ["abc", "def"], "sampling_params": {"max_new_tokens": 3}}),
        ("/generate", {"lora_path": "pirate", "text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 3}}),
    ],
)
def test_every_prompt_of_a_call_is_a_request_in_the_clients_trace(tmp_path, path, body):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    prompts = 2 if ["abc", "def"] in body.values() else 1

    def requests():
        return [span for span in exporter.get_finished_spans() if span.name == "request"]

    keys = KeyRing({digest_of("secret"): Key("acme")})
    on_finish = [Traces(provider.get_tracer("test")).end]
    with serving(tmp_path, keys=keys, adapters=("pirate",), on_finish=on_finish) as client:
        assert client.post(path, json=body, headers=HEADERS).status_code == 200
        assert until(lambda: len(requests()) == prompts)

    for span in requests():
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
        assert (span.attributes["rota.key"], span.attributes["rota.adapter"]) == ("acme", "pirate")
        assert span.attributes["rota.call"] == "mine"
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert {span.name for span in exporter.get_finished_spans()} == {"request", "queue", "prefill", "decode"}
