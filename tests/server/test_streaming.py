"""Streams under stress: silence, readers that are slow or gone, and crowds that say nothing."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.events import Finished, FinishReason
from rota.core.ids import RequestId
from rota.core.messages import Abort, Message
from rota.runtime.in_process import InProcessService
from rota.server.answers import respond
from rota.server.answers.answer import Gathered
from rota.server.answers.respond import sse_event
from rota.server.streams import Delta
from rota.text.parsed_delta import CallPiece, ParsedDelta
from tests.builders import capacity
from tests.fakes import FakeDevice, alphabet
from tests.server.letters import Gate, events_of, letters_device, raw_ask, serving, steps_made
from tests.waiting import TIMEOUT_S, until

STREAMED = {"prompt": "abc", "max_tokens": 4, "stream": True}
LONG = {"prompt": "abc", "max_tokens": 3000, "stream": True}


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate(at=0)
    yield gate
    gate.set()


def test_a_stream_that_waits_is_kept_alive_by_lines_that_even_the_simplest_client_skips(tmp_path, gate):
    device = FakeDevice(next_token=gate)
    with (
        serving(tmp_path, device, ServerConfig(stream_keep_alive=0.05)) as client,
        client.stream("POST", "/v1/completions", json=STREAMED) as response,
    ):
        lines = response.iter_lines()
        waiting = [next(lines) for _ in range(3)]
        gate.set()
        said = "".join(line for line in lines)

    assert response.status_code == 200
    assert waiting == [""] * 3
    assert '"finish_reason":"length"' in said
    assert said.endswith("data: [DONE]")


def test_an_error_that_comes_after_the_headers_is_the_last_event(tmp_path, gate):
    def fails(tokens: Sequence[int]) -> int:
        gate(tokens)
        raise ZeroDivisionError("a kernel went wrong")

    with (
        serving(tmp_path, FakeDevice(next_token=fails), ServerConfig(stream_keep_alive=0.05)) as client,
        client.stream("POST", "/v1/completions", json=STREAMED) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        gate.set()
        *_, error, done = [line for line in lines if line.startswith("data: ")]

    assert "a kernel went wrong" in error
    assert done == "data: [DONE]"


def test_an_answer_that_is_not_streamed_waits_without_a_word(tmp_path, gate):
    with serving(tmp_path, FakeDevice(next_token=gate), ServerConfig(stream_keep_alive=0.01)) as client:
        threading.Timer(0.1, gate.set).start()
        response = client.post("/v1/completions", json={**STREAMED, "stream": False})

    assert response.json()["choices"][0]["text"] == "defg"


def test_a_slow_reader_holds_up_nobody_and_misses_nothing(tmp_path, monkeypatch):
    """3,200 tokens with twenty log-probabilities each do not fit into the sockets: sending stops until it reads."""
    sent: list[int] = []

    def counted_event(content: bytes) -> bytes:
        event = sse_event(content)
        sent.append(len(event))
        return event

    monkeypatch.setattr(respond, "sse_event", counted_event)
    device = FakeDevice(next_token=alphabet, capacity=capacity(blocks=512))
    asked = {"prompt": "abc", "max_tokens": 400, "n": 8, "logprobs": 20, "stream": True}
    with serving(tmp_path, device) as client, raw_ask(client, receive_buffer=4096, **asked) as slow:
        assert slow.recv(1)
        assert until(lambda: len(device.plans) >= 400)
        # Its answer comes after all that the engine has told of the slow one's.
        quick = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
        sent_unread = sum(sent)
        received = bytearray()
        while block := slow.recv(1 << 16):
            received += block

    assert quick.json()["choices"][0]["text"] == "def"
    assert received.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in received
    assert sent_unread < 300_000 < len(received), "what is not read is neither made into events nor kept as such"
    assert received.count(b"data: {") < 3200, "what came while it did not read came together"


def test_a_client_that_leaves_is_noticed_while_its_request_still_waits(tmp_path, gate, monkeypatch):
    called_off, send = threading.Event(), InProcessService.send

    def listening_send(service: InProcessService, message: Message) -> None:
        send(service, message)
        if isinstance(message, Abort):
            called_off.set()

    monkeypatch.setattr(InProcessService, "send", listening_send)
    device = FakeDevice(next_token=gate)
    with serving(tmp_path, device) as client:
        with raw_ask(client, **LONG):
            assert until(lambda: device.plans), "it has not been asked for a token"
        assert called_off.wait(TIMEOUT_S)
        gate.set()
        assert steps_made(client, device) <= 3, "no more than were under way"


def processor_s(client: httpx.Client) -> float:
    """The processor's seconds that an answer costs server and client; of several, since accepting others costs too."""
    costs = []
    for _ in range(10):
        began_at = time.process_time()
        events = events_of(client.post("/v1/completions", json=STREAMED))
        costs.append(time.process_time() - began_at)
        assert "".join(event["choices"][0]["text"] for event in events) == "defg"
    return min(costs)


def test_thousands_of_idle_connections_cost_others_nothing(tmp_path):
    with serving(tmp_path, letters_device()) as client:
        alone = processor_s(client)
        address = urlsplit(str(client.base_url))
        idle = [socket.create_connection((address.hostname, address.port)) for _ in range(2000)]
        half = [connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n") for connection in idle[:1000]]
        among_many = processor_s(client)
        for connection in idle:
            connection.close()

    assert len(half) == 1000
    assert among_many < 5 * alone


# ── deltas that become one ────────────────────────────────────────────────────────────────────────────────────────────

ENDING = Finished(request_id=RequestId("a"), at=0.0, reason=FinishReason.STOP, embedding=(0.5,))
DELTAS = [
    Delta(0, [1], said=ParsedDelta("Once", "So")),
    Delta(0),
    Delta(0, [2, 3], said=ParsedDelta(" upon", calls=(CallPiece(index=0, name="f"),))),
    Delta(0, [4], said=ParsedDelta(" a time", "."), finish_reason="stop", ending=ENDING),
]


def gathered(deltas: list[Delta]) -> Delta:
    all_of_them = Gathered(0)
    for delta in deltas:
        all_of_them.add(delta)
    return all_of_them.whole


def test_deltas_are_joined_in_their_order_and_the_last_says_how_it_ends():
    said = ParsedDelta("Once upon a time", "So.", (CallPiece(index=0, name="f"),))
    assert gathered(DELTAS) == Delta(0, [1, 2, 3, 4], said=said, finish_reason="stop", ending=ENDING)
    assert gathered(DELTAS[:1]) == DELTAS[0]
    assert DELTAS[0].tokens == [1], "a delta belongs to its client"


def test_what_is_gathered_is_as_few_objects_for_a_long_answer_as_for_a_short_one():
    gathered = Gathered(0)
    gathered.add(Delta(0, [0], said=ParsedDelta("word")))
    gc.collect()
    before = len(gc.get_objects())
    for token in range(5000):
        gathered.add(Delta(0, [token], said=ParsedDelta("word")))
    gc.collect()

    assert len(gc.get_objects()) < before + 1000
    assert len(gathered.whole.tokens) == 5001
