"""SIGHUP and `rota serve`: keys are read again, no engine dies of it, and a server ends with its terminal only."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import PIPE, Program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import PATIENCE_S, line_of, until

SCRIPT = """
import sys
from rota.commands.serve import serve_model
from rota.core.config import ServerConfig
from rota.llm.config import engine_config
from tests.fakes import FakeDevice


def make_device(config):
    return FakeDevice()


if __name__ == "__main__":
    config = engine_config({"model_path": sys.argv[1]}, quiet=False)
    server = ServerConfig(port=0, log_format="json", api_key_file=sys.argv[2] or None)
    serve_model(config, server, make_device=make_device)
"""


@pytest.fixture(autouse=True)
def _hangups_are_heard() -> Iterator[None]:
    """Also where these tests were started by `nohup`: a server inherits what is done with a signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def serve(folder: Path, key_file: Path | None = None, **options: Any) -> AbstractContextManager[Program]:
    script = folder / "serve.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, script, write_byte_tokenizer(folder / "tiny"), str(key_file or "")]
    return started(command, env=environment, **({"stderr": PIPE} | options))


def audited(errors: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in errors.splitlines()]
    assert not any("engine died" in line["message"] for line in lines)
    return [line for line in lines if "action" in line]


def test_a_hangup_has_the_keys_read_again_and_reaches_no_engine(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[keys.acme]\nkey = "sk-acme"\nmay_use_base = true')
    file.chmod(0o600)
    body, headers = {"prompt": "abc", "max_tokens": 2}, {"x-api-key": "sk-new"}
    with serve(tmp_path, file) as server:
        url = line_of(server, "Rota serves").split()[-1]
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S).status_code == 401
        os.killpg(server.pid, signal.SIGHUP)
        file.write_text('[keys.acme]\nkey = "sk-new"\nmay_use_base = true')

        def answers() -> bool:
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
            return answer.status_code == 200

        assert until(answers)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE_S)

    changes = audited(errors)
    assert "SIGHUP" in [change["cause"] for change in changes]
    assert [change["changed"] for change in changes if change["changed"]] == [["acme"]]
    assert server.returncode == 0


def test_without_a_key_file_a_hangup_changes_nothing(tmp_path):
    with serve(tmp_path) as server:
        url = line_of(server, "Rota serves").split()[-1]
        os.killpg(server.pid, signal.SIGHUP)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}, timeout=PATIENCE_S)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE_S)

    assert answer.status_code == 200
    assert audited(errors) == []
    assert server.returncode == 0


def test_a_server_ends_with_its_terminal(tmp_path):
    ours, its = pty.openpty()
    with serve(tmp_path, stdin=its) as server:
        os.close(its)
        url = line_of(server, "Rota serves").split()[-1]
        os.kill(server.pid, signal.SIGHUP)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200, "the terminal is still there"
        os.close(ours)
        os.kill(server.pid, signal.SIGHUP)
        server.communicate(timeout=PATIENCE_S)

    assert server.returncode == 0
