"""The life of `rota serve` as a process: what it logs, which signals it hears, whom it tells, and how it ends.

One server lives once for the whole file, and each test looks at a part of what was seen of it.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rota.core.errors import ConfigError, EngineLostError
from tests.processes import PIPE, Program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

SCRIPT = """
import os, sys, threading, warnings
from functools import partial
from pathlib import Path
from rota.cli import main
from rota.commands.serve import serve_model
from rota.core.stages import Stage
from rota.engine.progress import Progress
from tests.fakes import FakeDevice

DIED = Path(__file__).parent / "died"


def fail():
    raise ZeroDivisionError("in a thread")


def make_noise(where):
    warnings.warn(f"a warning of {where}")
    print(f"a line of {where}", file=sys.stderr)
    os.write(2, f"a write of {where}\\n".encode())
    with Progress(f"Progress of {where}", 1, clock=iter(range(0, 1000, 100)).__next__) as progress:
        progress.update()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def next_token(tokens):
    if len(tokens) == 11:  # the first engine dies at the eighth token of an answer, and no other engine starts
        DIED.touch()
        os._exit(9)
    return 97


def make_device(how, config):
    if DIED.exists():
        os._exit(9)
    if how != "mortal":
        make_noise("engine")
    if how == "broken":
        raise ValueError("two\\nlines")
    return FakeDevice(next_token=next_token, stages=(Stage("imports", 0.0, 1.0), Stage("weights", 1.0, 2.04)))


if __name__ == "__main__":
    how, *flags = sys.argv[1:]
    on_ready = (lambda url: make_noise("server")) if how == "noisy" else None
    main(["serve", *flags], serve=partial(serve_model, on_ready=on_ready, make_device=partial(make_device, how)))
"""


def serve(
    folder: Path, how: str, *flags: str | Path, stdin: int | None = None, stderr: int = PIPE, **environment: str
) -> AbstractContextManager[Program]:
    (folder / "serve.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, folder / "serve.py", how, write_byte_tokenizer(folder / "tiny"), "--port", "0", *flags]
    return started(command, stderr=stderr, env=environ, stdin=stdin, preexec_fn=hear_signals)


def hear_signals() -> None:
    """A server inherits what is done with a signal: `nohup` may have started these tests, or a shell's `&`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ask(url: str, key: str = "", **fields: Any) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 2, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key})


def objects_in(errors: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in errors.splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    return lines


@dataclass(frozen=True)
class Life:
    """What was seen of a server from its start to its end."""

    ready: str
    replica: dict[str, Any]
    answers: list[int]
    notices: list[bytes]
    lines: list[dict[str, Any]]
    exit_code: int


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """A server with keys, in a terminal, of a service manager. It hears a hangup twice, the second without terminal."""
    folder, (ours, its) = tmp_path_factory.mktemp("life"), pty.openpty()
    flags = "--log-format", "json", "--api-key", "sk-operator", "--api-key-file", write_key(folder, "sk-first")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(TIMEOUT_S)
        with serve(folder, "noisy", *flags, stdin=its, NOTIFY_SOCKET=str(folder / "notify")) as server:
            os.close(its)
            url, ready = line_of(server, "Rota serves").split()[-1], line_of(server, "Ready after")
            notices = [manager.recv(100)]
            info = httpx.get(f"{url}/server_info", headers={"x-api-key": "sk-operator"}).json()
            speak_no_http(url)
            answers = [ask(url, "sk-first").status_code, ask(url, "sk-last").status_code]
            os.killpg(server.pid, signal.SIGHUP)
            for key in ("sk-next", "sk-last"):  # an answer comes behind the signal, and so the second read does
                write_key(folder, key)
                assert until(lambda key=key: ask(url, key).status_code == 200)
            answers += [ask(url, "sk-first").status_code, ask(url, "sk-last").status_code]
            os.close(ours)
            os.kill(server.pid, signal.SIGHUP)
            notices.append(manager.recv(100))
            _, errors = server.communicate(timeout=TIMEOUT_S)
    return Life(ready, info["replicas"][0], answers, notices, objects_in(errors), server.returncode)


def write_key(folder: Path, key: str) -> Path:
    """Puts a new file in place of the old one, as a careful operator does."""
    new, file = folder / "new.toml", folder / "keys.toml"
    new.write_text(f'[keys.acme]\nkey = "{key}"\nmay_use_base = true')
    new.chmod(0o600)
    return new.replace(file)


def speak_no_http(url: str) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"this is not HTTP\r\n\r\n")
        connection.recv(1024)


def test_whoever_writes_while_it_serves_writes_json(life):
    messages = [(line["level"], line["message"]) for line in life.lines]
    for where in ("engine", "server"):
        assert ("info", f"a line of {where}") in messages
        assert ("info", f"a write of {where}") in messages
        assert ("info", f"Progress of {where}: 1 of 1") in messages
        assert any(level == "warning" and f"UserWarning: a warning of {where}" in text for level, text in messages)
    assert ("info", "request") in messages
    assert ("warning", "Invalid HTTP request received.") in messages
    uncaught = [line for line in life.lines if line["message"] == "Uncaught ZeroDivisionError."]
    assert len(uncaught) == 2
    assert all("in a thread" in line["error"] and line["level"] == "error" for line in uncaught)


def test_the_stages_of_a_start_are_printed_logged_and_told(life):
    assert life.ready.endswith(" s: imports 1.0, weights 2.0.\n")
    assert (life.replica["start"]["seconds"], life.replica["restart"]) == (3.04, None)
    assert life.replica["start"]["stages"][1] == {"name": "weights", "began_s": 1.0, "seconds": 2.04}
    assert life.lines[0]["message"] == "Starting: imports.", "before an engine or a device is there"
    (ready,) = [line for line in life.lines if line["message"] == "The server is ready."]
    assert (ready["stages"], ready["seconds"] > 0.0) == ("imports 1.0, weights 2.0", True)


def test_a_hangup_has_the_keys_read_again_and_reaches_no_engine(life):
    assert life.answers == [200, 401, 401, 200]
    assert not any("engine died" in line["message"] for line in life.lines)
    changes = [line for line in life.lines if "action" in line]
    assert "SIGHUP" in [change["cause"] for change in changes]
    assert [change["changed"] for change in changes if change["changed"]] == [["acme"], ["acme"]]


def test_a_service_manager_is_told_that_the_server_is_ready_and_that_it_stops(life):
    assert life.notices == [b"READY=1", b"STOPPING=1"]


def test_a_server_ends_with_its_terminal(life):
    assert life.exit_code == 0


def test_what_ends_it_is_json_too_and_an_error_with_its_trace_is_one_line(tmp_path):
    with serve(tmp_path, "broken", "--log-format", "json") as server:
        _, errors = server.communicate(timeout=TIMEOUT_S)

    lines = objects_in(errors)
    (trace,) = [line["error"] for line in lines if "error" in line and "ValueError" in line["error"]]
    assert "make_device" in trace
    assert "two\nlines" in trace
    assert (lines[-1]["level"], lines[-1]["message"]) == ("error", "The engine failed with ValueError: two\nlines")
    assert server.returncode == ConfigError.exit_code


def test_a_server_that_has_given_up_answers_logs_and_ends_with_its_own_code(tmp_path):
    with serve(tmp_path, "mortal") as server:
        url = line_of(server, "Rota serves").split()[-1]
        os.killpg(server.pid, signal.SIGHUP)  # without a key file it changes nothing
        assert ask(url).status_code == 200
        answer = ask(url, max_tokens=100)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
        assert "please send it again" in answer.json()["error"]["message"]
        # This one waits for an engine, and none comes.
        waiting = ask(url, max_tokens=1)
        _, errors = server.communicate(timeout=TIMEOUT_S)

    assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "engine_died")
    assert server.returncode == EngineLostError.exit_code != ConfigError.exit_code
    # The first engine has answered: on a busy machine it has lived too long for its death to count.
    assert errors.count("WARNING The engine died and is started again.") in (4, 5)
    assert 'ERROR The engine stays down. engine=0 why="The engine died 5 times in a row' in errors
    assert "rota: The engine died 5 times in a row soon after its start and stays down." in errors
    assert "exit code 9" in errors


def test_after_a_ctrl_c_in_a_terminal_nothing_is_left_over(tmp_path):
    """The engine has shown a bar there. Whoever is in the group hears the signal, as from a keyboard."""
    ours, its = pty.openpty()
    with serve(tmp_path, "noisy", stderr=its) as server:
        os.close(its)
        line_of(server, "Rota serves")
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait(TIMEOUT_S) == 0
    seen = b""
    with suppress(OSError):  # the terminal is closed
        while part := os.read(ours, 65_536):
            seen += part
    os.close(ours)
    assert b"Starting: imports." in seen
    assert b"leaked" not in seen
