"""A server whose engine does not come back ends with a code of its own, after its clients were told."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.errors import ConfigError, EngineLostError
from tests.processes import PIPE, Program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import PATIENCE_S, line_of

# The first engine dies at the eighth token of an answer, and no other engine starts.
SCRIPT = """
import os, sys
from functools import partial
from pathlib import Path
from rota.cli import main
from rota.commands.serve import serve_model
from tests.fakes import FakeDevice

DIED = Path(__file__).parent / "died"

def next_token(tokens):
    if len(tokens) == 11:
        DIED.touch()
        os._exit(9)
    return 97

def make_device(config):
    if DIED.exists():
        os._exit(9)
    return FakeDevice(next_token=next_token)

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]], serve=partial(serve_model, make_device=make_device))
"""


@contextmanager
def serving(folder: Path, *flags: str, **environment: str) -> Iterator[tuple[Program, str]]:
    (folder / "serve.py").write_text(SCRIPT)
    model = write_byte_tokenizer(folder / "tiny")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, folder / "serve.py", model, "--port", "0", *flags]
    with started(command, stderr=PIPE, env={**os.environ, "PYTHONPATH": path, **environment}) as server:
        yield server, line_of(server, "Rota serves").split()[-1]


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "abc", **fields}, timeout=PATIENCE_S)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_server_that_has_given_up_answers_logs_and_ends_with_its_own_code(tmp_path, form):
    with serving(tmp_path, "--log-format", form) as (server, url):
        answer = ask(url, max_tokens=100)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert "please send it again" in answer.json()["error"]["message"]
        # This one waits for an engine, and none comes.
        waiting = ask(url, max_tokens=1)
        _, errors = server.communicate(timeout=PATIENCE_S)

    assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "engine_died")
    assert server.returncode == EngineLostError.exit_code != ConfigError.exit_code
    if form == "json":
        lines = [(line["level"], line["message"]) for line in map(json.loads, errors.splitlines())]
        assert ("error", "The engine stays down.") in lines
        assert lines.count(("warning", "The engine died and is started again.")) == 4
    else:
        assert 'ERROR The engine stays down. engine=0 why="The engine died 5 times in a row' in errors
        assert "rota: The engine died 5 times in a row soon after its start and stays down." in errors
    assert "exit code 9" in errors


def test_a_service_manager_is_told_that_the_server_is_ready_and_that_it_stops(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        with serving(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify")) as (server, _):
            assert manager.recv(100) == b"READY=1"
            server.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert server.wait(PATIENCE_S) == 0
