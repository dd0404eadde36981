"""A real process that is told to stop: who is inside may end, who comes is sent away, and it leaves with code 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rota.server.door.connection import MAX_HEAD_BYTES
from tests.engine.model_factory import make_tiny_model
from tests.processes import PIPE, Program, started
from tests.server.engines import REPLICAS
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of

# It says six letters, and the rest once there is a file called "go".
SCRIPT = """
import sys
from functools import partial
from pathlib import Path
from rota.core.config import ServerConfig
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from tests.server.applications import made_app
from rota.server.listen import listen
from rota.server.door.door import hold_port
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice, alphabet
from tests.server.engines import threads
from tests.waiting import until

def next_letter(go, tokens):
    assert len(tokens) < 9 or until(go.exists)
    return alphabet(tokens)

if __name__ == "__main__":
    device = partial(FakeDevice, next_token=partial(next_letter, Path(sys.argv[1]) / "go"))
    service = EngineClient(threads(device))
    app = made_app(service, Tokenizer(sys.argv[1]), Registry("letters", sys.argv[1]))
    config = ServerConfig(port=0, drain_timeout=float(sys.argv[2]))
    listen(hold_port(config.host, 0), app, service, config, partial(print, flush=True), partial(print, flush=True))
"""

Start = Callable[[float], tuple[Program, httpx.Client]]


def python(*arguments: str) -> AbstractContextManager[Program]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return started([sys.executable, *arguments], stderr=PIPE, env=environment)


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Starts a server whose answers end when they may."""
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    with ExitStack() as stack:

        def start(drain_s: float) -> tuple[Program, httpx.Client]:
            folder = write_byte_tokenizer(tmp_path / "tokenizer")
            server = stack.enter_context(python(str(script), str(folder), str(drain_s)))
            url = line_of(server).strip()
            return server, stack.enter_context(httpx.Client(base_url=url))

        yield start


@contextmanager
def open_stream(client: httpx.Client, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = {"prompt": "abc", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = filter(None, stream.iter_lines())
        next(lines)
        yield lines


def told(server: Program) -> str:
    """Sends it the signal, and waits until it says that it has heard."""
    server.send_signal(signal.SIGTERM)
    return line_of(server)


def last_event(lines: Iterator[str]) -> dict[str, Any]:
    *_, ending, done = lines
    assert done == "data: [DONE]"
    return json.loads(ending.removeprefix("data: "))


def test_whoever_is_inside_is_served_and_whoever_comes_is_sent_away(start, tmp_path):
    server, client = start(300.0)
    with open_stream(client, max_tokens=20) as lines:
        assert "1 requests have 300 seconds to end" in told(server)
        refused = client.post("/v1/completions", json={"prompt": "abc"})
        echo = client.post("/v1/completions", json={"prompt": "abc", "echo": True, "max_tokens": 0})
        native = client.post("/generate", json={"text": "abc"})
        load = client.post("/v1/load_lora_adapter", json={"lora_name": "owl", "lora_path": "/owl"})
        health = client.get("/health")
        (tmp_path / "tokenizer" / "go").touch()
        ending = last_event(lines)
    _, error = server.communicate()

    assert [answer.status_code for answer in (refused, echo, native, load)] == [503] * 4
    assert refused.json()["error"]["code"] == "server_stopping"
    assert int(refused.headers["Retry-After"]) > 0
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert ending["choices"][0]["finish_reason"] == "length"
    assert (server.returncode, error) == (0, "")


def answer_to_a_head_without_end(url: str) -> bytes:
    """What a server says to headers that are one byte too long, and go on."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-More: ".ljust(MAX_HEAD_BYTES + 1, b"a"))
        return connection.recv(65536)


@pytest.mark.long("a whole server with torch starts; tests of keys, of listening and of commands prove its parts")
def test_the_command_serves_a_model_with_a_key_and_stops_cleanly(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    make_tiny_model(folder, "smollm2")
    arguments = (
        "-c", "from rota.cli import main; main()", "serve", str(folder), "--port", "0", "--device", "cpu", "--quiet",
        "--kv-blocks", "32", "--data-parallel-size", str(REPLICAS),
        "--api-key", "one", "--api-key", "two",
    )  # fmt: skip
    with python(*arguments) as server:
        url = line_of(server).split()[-1]
        assert line_of(server).startswith("Ready after ")
        assert " slots for adapters up to rank " in line_of(server)
        if REPLICAS > 1:
            assert line_of(server) == f"{REPLICAS} replicas of the model share the requests.\n"
        assert line_of(server) == "Requests need a key.\n"
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        with httpx.Client(base_url=url) as client:
            stranger = client.post("/generate", json=body)
            client.headers["x-api-key"] = "two"
            known = client.post("/generate", json=body)
            load = client.post("/v1/load_lora_adapter", json={"lora_name": "owl", "lora_path": "/owl"})
        talker = answer_to_a_head_without_end(url)
        server.send_signal(signal.SIGTERM)
        server.communicate()

    assert stranger.status_code == 401
    assert known.json()["meta_info"]["completion_tokens"] == 3
    assert load.status_code == 403
    assert "--adapter-root" in load.json()["error"]["message"]
    assert talker.startswith(b"HTTP/1.1 400 ")
    assert server.returncode == 0
