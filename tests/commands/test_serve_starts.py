"""A start of `rota serve`: what it waits for and imports, and what its engine has slots for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.runtime.lifeline import tied
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.processes import is_alive, started
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S, line_of, until

# ── what is imported ──────────────────────────────────────────────────────────────────────────────────────────────────

HEAVY = (
    "torch",
    "numpy",
    "tokenizers",
    "jinja2",
    "fastapi",
    "uvicorn",
    "rota.sim",
    "rota.bench.run",
    "rota.server.app",
)
LOOK = f"print([name for name in {HEAVY} if name in sys.modules])"

SERVE = f"""
import sys
import rota.commands.engines
from rota.cli import main

def look(*_):
    {LOOK}
    raise SystemExit

rota.commands.engines.engine_service = look
main(["serve", sys.argv[1], "--port", "0", "--device", "cpu"])
"""


def printed(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    ran = subprocess.run(tied(command), stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout.strip()


def test_the_engine_is_started_before_anything_that_only_answers_need_is_imported(tmp_path):
    (write_byte_tokenizer(tmp_path) / "config.json").write_text("{}")
    assert printed(SERVE, str(tmp_path)) == "[]"


def test_a_bench_without_a_plot_does_without_matplotlib():
    program = "import sys, rota.bench.run, rota.commands.bench; print('matplotlib' in sys.modules)"
    assert printed(program) == "False"


def test_the_engines_process_imports_no_command_line_with_the_main_module():
    program = "import sys, rota.__main__; print([name for name in ('rota.cli', 'typer') if name in sys.modules])"
    assert printed(program) == "[]"


# ── the first adapters ────────────────────────────────────────────────────────────────────────────────────────────────

FLAGS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-blocks", "64", "--max-running-requests", "4")


@pytest.mark.long("a server starts")
def test_slots_are_made_for_the_adapters_that_the_server_was_still_looking_at(tmp_path):
    folder = write_byte_tokenizer(tmp_path / "tiny")
    model = make_tiny_model(folder, "smollm2")
    paths = [f"{name}={make_adapter(tmp_path / name, model, r=rank)}" for name, rank in (("small", 4), ("large", 20))]
    command = [sys.executable, "-m", "rota", "serve", str(folder), *FLAGS, "--lora-paths", *paths]
    with started(command) as server:
        url = line_of(server, "Rota serves ").split()[-1]
        info = httpx.get(f"{url}/server_info").json()
        asked = {"model": "large", "prompt": "abc", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=asked)

    assert (info["slots"]["count"], info["slots"]["rank"]) == (8, 24)
    assert answer.status_code == 200


# ── a spare engine ────────────────────────────────────────────────────────────────────────────────────────────────────

COMMAND = [sys.executable, "-m", "rota", "serve", "--spare-engine", "on", "--port", "0", "--quiet"]


IMPORTS = """
import os
from rota.llm.config import import_device
import_device(None)
print(len(os.listdir("/proc/self/task")))
"""


@cache
def threads_of_imports() -> int:
    """Threads of a process that has done an engine's imports: some libraries leave one of their own, by processor."""
    found = subprocess.run(tied([sys.executable, "-c", IMPORTS]), check=True, capture_output=True, text=True)
    return int(found.stdout)


def spares_of(server: int) -> list[int]:
    """The children of a server that Linux would end first, and that have no more threads: their imports are done."""
    children = [int(pid) for task in Path(f"/proc/{server}/task").iterdir() for pid in _words(task / "children")]
    return [
        pid
        for pid in children
        if _words(Path(f"/proc/{pid}/oom_score_adj")) == ["1000"]
        and any("libtorch" in word for word in _words(Path(f"/proc/{pid}/maps")))
        and len(list(Path(f"/proc/{pid}/task").iterdir())) == threads_of_imports()
    ]


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().split()
    return []


def opened(pid: int) -> list[str]:
    return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]


def seconds(start: dict[str, Any], name: str) -> float:
    return next(stage["seconds"] for stage in start["stages"] if stage["name"] == name)


@pytest.mark.long("a whole server that is started twice: a minute on a busy core")
def test_a_restart_with_a_spare_does_no_imports():
    with started(COMMAND) as server, httpx.Client(timeout=TIMEOUT_S) as client:
        url = line_of(server, "Rota serves").split()[-1]
        (first,) = client.get(f"{url}/server_info").json()["replicas"]
        assert until(lambda: len(spares_of(server.pid)) == 1)
        (spare,) = spares_of(server.pid)
        assert not [path for path in opened(spare) if path.startswith("/dev/nvidia")]

        os.kill(first["pid"], signal.SIGKILL)
        assert until(lambda: not is_alive(first["pid"]))
        body = {"model": client.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": "Hello", "max_tokens": 1}
        assert until(lambda: client.post(f"{url}/v1/completions", json=body).status_code == 200)
        (again,) = client.get(f"{url}/server_info").json()["replicas"]
        assert again["pid"] == spare
        assert seconds(again["restart"], "imports") < seconds(first["start"], "imports") / 10
