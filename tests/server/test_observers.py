"""Those who watch calls hear everything and hold up nobody, and a call is a part of its client's trace."""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId
from rota.observe.traces import Traces
from rota.runtime.registry import Registry
from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.streams import Observers
from rota.text.tokenizer import Tokenizer
from tests.builders import request
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import letters_device, serving
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import until


class Clumsy:
    """An observer that fails whenever it is told something."""

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        raise KeyError(request_id)

    def observe(self, events: Iterable[Event]) -> None:
        raise ZeroDivisionError


def test_those_behind_one_that_fails_hear_everything_and_the_log_has_it_once(caplog):
    heard: list[list[Event]] = []
    observers = Observers([Clumsy()], [heard.append])

    for _ in range(3):
        observers.asked(request("a"))
        observers.observe([])

    assert heard == [[]] * 3
    assert [record.getMessage().split()[0] for record in caplog.records] == ["Clumsy.asked", "Clumsy.observe"]
    assert caplog.records[1].exc_info[0] is ZeroDivisionError


def test_an_observer_that_fails_holds_back_nobodys_answer(tmp_path):
    service = engines(letters_device)
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    app = made_app(service, tokenizer, Registry("letters", "/letters"), watchers=[Clumsy()])
    with running(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 3})

    assert answer.json()["choices"][0]["text"] == "def"


# ── traces ────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
