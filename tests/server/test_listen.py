from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import AdapterError, ConfigError, EngineDiedError, ModelError
from rota.core.lora_paths import LoraPath
from rota.runtime.registry import Registry
from rota.runtime.service import BuildDevice, InProcessService
from rota.runtime.stocked import StockedService
from rota.server.app import create_app
from rota.server.listen import listen
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.tiny_tokenizer import write_byte_tokenizer


def listen_with(build_device: BuildDevice, folder: Path, announce, *adapters: LoraPath) -> None:
    """Listen on a free port until a signal comes."""
    registry = Registry("letters", str(folder))
    service = StockedService(
        InProcessService(build_device, EngineConfig()), [registry.add(adapter) for adapter in adapters]
    )
    app = create_app(service, Tokenizer(write_byte_tokenizer(folder)), registry)
    listen(app, service, ServerConfig(port=0), announce)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_listening_once_it_has_been_announced(tmp_path, number):
    heard = []

    def announce(url: str) -> None:
        heard.append(httpx.get(f"{url}/health").json())
        os.kill(os.getpid(), number)

    listen_with(FakeDevice, tmp_path, announce)

    assert heard == [{"status": "ready"}]


def no_such_model() -> FakeDevice:
    raise ModelError("There is no model in /nowhere.")


def test_a_service_that_cannot_start_ends_listening_with_its_sentence(tmp_path):
    with pytest.raises(EngineDiedError, match=r"^There is no model in /nowhere\.$"):
        listen_with(no_such_model, tmp_path, lambda url: pytest.fail("it was announced"))


def test_it_is_announced_when_the_first_adapters_are_there(tmp_path):
    heard = []

    def announce(url: str) -> None:
        heard.extend(model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"])
        heard.append(httpx.get(f"{url}/health").status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    listen_with(FakeDevice, tmp_path, announce, LoraPath("pirate", "/a/pirate"), LoraPath("poet", "/a/poet"))

    assert heard == ["letters", "pirate", "poet", 200]


def test_a_first_adapter_that_is_refused_ends_listening_with_its_sentence(tmp_path):
    adapters = LoraPath("pirate", "/a/pirate"), LoraPath("poet", "/a/broken")
    with pytest.raises(AdapterError, match=r"^/a/broken is broken\.$"):
        listen_with(FakeDevice, tmp_path, lambda url: pytest.fail("it was announced"), *adapters)


def test_a_port_that_is_taken_is_refused_with_advice():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*--port"):
            listen(None, None, ServerConfig(port=port), print)


SCRIPT = """
import sys
from functools import partial
from rota.core.config import EngineConfig, ServerConfig
from rota.runtime.registry import Registry
from rota.runtime.supervisor import SupervisedService
from rota.server.app import create_app
from rota.server.listen import listen
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice

if __name__ == "__main__":
    service = SupervisedService(partial(FakeDevice, step_s=0.02), EngineConfig())
    app = create_app(service, Tokenizer(sys.argv[1]), Registry("letters", sys.argv[1]))
    listen(app, service, ServerConfig(port=0), partial(print, flush=True))
"""


def test_a_server_with_an_engine_process_ends_cleanly_in_the_middle_of_a_stream(tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    server = subprocess.Popen(
        [sys.executable, str(script), str(write_byte_tokenizer(tmp_path / "tokenizer"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    url = server.stdout.readline().strip()
    body = {"prompt": "abc", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        *_, ending, done = filter(None, lines)
    _, error = server.communicate(timeout=20)

    assert "The server is stopping" in ending
    assert done == "data: [DONE]"
    assert (server.returncode, error) == (0, "")
    assert time.monotonic() - began < 6.0
