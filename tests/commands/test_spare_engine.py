"""`rota serve --spare-engine on`, whole: the spare touches no GPU, and a restart with it does no imports."""

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
from tests.processes import is_alive, started
from tests.waiting import TIMEOUT_S, line_of, until

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
