"""A server listens, is announced, and leaves when it is told to: who is inside may end, who comes is sent away."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.core.errors import AdapterError, ConfigError, EngineDiedError
from rota.core.lora_paths import LoraPath
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.runtime.service import BuildDevice
from rota.server.door.connection import MAX_HEAD_BYTES
from rota.server.door.door import Door, hold_port
from rota.server.listen import GracefulServer, listen
from rota.text.tokenizer import Tokenizer
from tests.engine.model_factory import make_tiny_model
from tests.fakes import FakeDevice, no_such_model
from tests.processes import PIPE, Program, started
from tests.server.applications import made_app
from tests.server.endless import ENDLESS, endless_device
from tests.server.engines import REPLICAS, as_of_one, engines
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until


def listen_with(build_device: BuildDevice, folder: Path, announce, *adapters: LoraPath, **options) -> None:
    """Listen on a free port until a signal comes, or what is done when it is announced fails."""
    thread, announced = ThreadPoolExecutor(1), list[Future[None]]()
    is_over = threading.Event()

    def act(url: str) -> None:
        try:
            announce(url)
        except BaseException:
            if not is_over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            raise

    registry = Registry("letters", str(folder))
    stock = [registry.add(adapter) for adapter in adapters]
    service = EngineClient(engines(build_device), stock)
    app = made_app(service, Tokenizer(write_byte_tokenizer(folder)), registry)
    say = options.pop("say", print)
    config = ServerConfig(port=0, **options)
    listen(
        hold_port(config.host, config.port),
        app,
        service,
        config,
        lambda url: announced.append(thread.submit(act, url)),
        say,
    )
    is_over.set()
    for one in announced:
        one.result(timeout=TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_listening_once_it_has_been_announced(tmp_path, number):
    heard = []

    def announce(url: str) -> None:
        heard.append(httpx.get(f"{url}/health").json())
        os.kill(os.getpid(), number)

    listen_with(FakeDevice, tmp_path, announce)

    assert heard == [{"status": "ready"}]


def test_a_service_that_cannot_start_ends_listening_with_its_sentence(tmp_path):
    with pytest.raises(EngineDiedError) as caught:
        listen_with(no_such_model, tmp_path, lambda _: pytest.fail("it was announced"))
    assert as_of_one(str(caught.value)) == "There is no model in /nowhere."


def test_it_is_announced_when_the_first_adapters_are_there(tmp_path):
    heard = []

    def announce(url: str) -> None:
        heard.extend(model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"])
        heard.append(httpx.get(f"{url}/health").status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    listen_with(
        FakeDevice, tmp_path, announce, LoraPath(name="pirate", path="/a/pirate"), LoraPath(name="poet", path="/a/poet")
    )

    assert heard == ["letters", "pirate", "poet", 200]


def test_a_first_adapter_that_is_refused_ends_listening_with_its_sentence(tmp_path):
    adapters = LoraPath(name="pirate", path="/a/pirate"), LoraPath(name="poet", path="/a/broken")
    with pytest.raises(AdapterError, match=r"^/a/broken is broken\.$"):
        listen_with(FakeDevice, tmp_path, lambda _: pytest.fail("it was announced"), *adapters)


def test_a_port_that_is_taken_is_refused_with_advice():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*--port"):
            hold_port("127.0.0.1", port)


def test_a_port_that_is_held_lets_no_connection_in_before_there_is_a_server():
    with hold_port("127.0.0.1", 0) as holder, pytest.raises(ConnectionRefusedError):
        socket.create_connection(holder.getsockname())


def test_of_two_that_hold_a_port_the_first_to_listen_has_it():
    with hold_port("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with hold_port("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(ConfigError, match=rf"port {port} .*--port"):
                listen(second, None, None, ServerConfig(port=port), print)


def test_whoever_hears_that_it_stops_is_sent_away_before_the_drain_has_begun(tmp_path, monkeypatch):
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True}
    was_told, was_refused = threading.Event(), threading.Event()
    drain, heard = EngineClient.drain, []

    def drain_late(service: EngineClient, timeout_s: float) -> None:
        assert was_refused.wait(TIMEOUT_S)
        drain(service, timeout_s)

    def announce(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            os.kill(os.getpid(), signal.SIGTERM)
            assert was_told.wait(TIMEOUT_S)
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc"})
            was_refused.set()
            heard.extend([answer.status_code, answer.json()["error"]["code"]])

    monkeypatch.setattr(EngineClient, "drain", drain_late)
    listen_with(endless_device, tmp_path, announce, say=lambda _: was_told.set())

    assert heard == [503, "server_stopping"]


@pytest.mark.parametrize(("drain_s", "signals"), [(0.2, 1), (600.0, 2)])
def test_answers_that_outlast_the_time_or_the_patience_of_the_operator_are_ended_with_a_word(
    tmp_path, drain_s, signals
):
    body = {"prompt": "abc", "max_tokens": ENDLESS, "stream": True}
    heard, said, was_told = [], [], threading.Event()

    def say(sentence: str) -> None:
        said.append(sentence)
        was_told.set()

    def announce(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = filter(None, stream.iter_lines())
            next(lines)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                assert was_told.wait(TIMEOUT_S)
            heard.extend(lines)

    listen_with(endless_device, tmp_path, announce, drain_timeout=drain_s, say=say)

    assert "1 requests have" in said[0]
    assert '"code":"server_stopping"' in heard[-2]
    assert heard[-1] == "data: [DONE]"


def test_a_server_that_is_told_to_stop_while_it_starts_stops_without_complaint(tmp_path):
    is_starting, may_start = threading.Event(), threading.Event()

    def build() -> FakeDevice:
        is_starting.set()
        assert may_start.wait(TIMEOUT_S)
        return FakeDevice()

    def interrupt() -> None:
        assert is_starting.wait(TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGTERM)
        may_start.set()

    threading.Thread(target=interrupt).start()
    listen_with(build, tmp_path, lambda _: None)


def test_however_many_signals_come_the_application_ends_as_it_should(tmp_path, caplog):
    """The third one ends all waits for clients, and must not leave the application in the middle."""
    ended = []

    async def live() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("a companion")

    def stop() -> None:
        ended.append("the service")
        inner.stop()

    inner = engines(FakeDevice)
    service = EngineClient(inner)
    service.stop = stop  # type: ignore[method-assign]
    registry, tokenizer = Registry("letters", str(tmp_path)), Tokenizer(write_byte_tokenizer(tmp_path))
    app = made_app(service, tokenizer, registry, service_tasks=[live])
    config = ServerConfig(port=0)
    server = GracefulServer(app, service, Door(config), config.drain_timeout, lambda _: None)
    thread = threading.Thread(target=server.run, args=([hold_port(config.host, 0)],))
    thread.start()
    assert until(server.accepts.is_set)
    for _ in range(3):
        server.handle_exit(signal.SIGTERM, None)
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()
    assert server.force_exit
    assert ended.index("a companion") < len(ended) - 1, "the service is stopped behind it, as at every end"
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == []


# ── a real process ────────────────────────────────────────────────────────────────────────────────────────────────────

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
