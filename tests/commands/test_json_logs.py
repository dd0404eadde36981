"""With --log-format json every line on stderr is a JSON object, whoever writes it, from the start to the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.processes import PIPE, Program, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import PATIENCE_S, line_of

SCRIPT = """
import os, sys, threading, warnings
from rota.commands.serve import serve_model
from rota.core.config import ServerConfig
from rota.core.stages import Stage
from rota.engine.progress import Progress
from rota.llm.config import engine_config
from tests.fakes import FakeDevice


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


def make_device(config):
    make_noise("engine")
    if sys.argv[2] == "broken":
        raise ValueError("two\\nlines")
    return FakeDevice(stages=(Stage("imports", 0.0, 1.0), Stage("weights", 1.0, 2.04)))


if __name__ == "__main__":
    config = engine_config({"model_path": sys.argv[1]}, quiet=False)
    server = ServerConfig(port=0, log_format="json")
    serve_model(config, server, lambda url: make_noise("server"), make_device)
"""


def serve(folder: Path, how: str) -> AbstractContextManager[Program]:
    script = folder / "serve.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, script, write_byte_tokenizer(folder / "tiny"), how]
    return started(command, stderr=PIPE, env=environment)


def objects_in(errors: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in errors.splitlines()]
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    return lines


def test_whoever_writes_while_it_serves_writes_json(tmp_path):
    with serve(tmp_path, "well") as server:
        url = line_of(server, "Rota serves").split()[-1]
        assert line_of(server, "Ready after").endswith(" s: imports 1.0, weights 2.0.\n")
        (replica,) = httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json()["replicas"]
        assert (replica["start"]["seconds"], replica["restart"]) == (3.04, None)
        assert replica["start"]["stages"][1] == {"name": "weights", "began_s": 1.0, "seconds": 2.04}
        httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}, timeout=PATIENCE_S)
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"this is not HTTP\r\n\r\n")
            connection.recv(1024)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE_S)

    lines = objects_in(errors)
    messages = [(line["level"], line["message"]) for line in lines]
    for where in ("engine", "server"):
        assert ("info", f"a line of {where}") in messages
        assert ("info", f"a write of {where}") in messages
        assert ("info", f"Progress of {where}: 1 of 1") in messages
        assert any(level == "warning" and f"UserWarning: a warning of {where}" in text for level, text in messages)
    assert ("info", "request") in messages
    (ready,) = [line for line in lines if line["message"] == "The server is ready."]
    assert (ready["stages"], ready["seconds"] > 0.0) == ("imports 1.0, weights 2.0", True)
    assert ("warning", "Invalid HTTP request received.") in messages
    uncaught = [line for line in lines if line["message"] == "Uncaught ZeroDivisionError."]
    assert len(uncaught) == 2
    assert all("in a thread" in line["error"] and line["level"] == "error" for line in uncaught)
    assert server.returncode == 0


def test_what_ends_it_is_json_too_and_an_error_with_its_trace_is_one_line(tmp_path):
    with serve(tmp_path, "broken") as server:
        _, errors = server.communicate(timeout=PATIENCE_S)

    lines = objects_in(errors)
    (trace,) = [line["error"] for line in lines if "error" in line and "ValueError" in line["error"]]
    assert "make_device" in trace
    assert "two\nlines" in trace
    assert (lines[-1]["level"], lines[-1]["message"]) == ("error", "The engine failed with ValueError: two\nlines")
    assert server.returncode == 2
