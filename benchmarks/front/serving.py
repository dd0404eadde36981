"""The server as `rota serve` builds it, around the paced device, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from front.paced import paced_device
from front.ticks import tick_tokens
from rota.commands.serve import serve_model
from rota.core.config import ServerConfig
from rota.llm.config import engine_config, locate_model
from rota.runtime.lifeline import tied
from rota.text.tokenizer import Tokenizer

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """A running server and its processes."""

    url: str
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """Seconds of a core each process has used so far."""
        return {name: _cpu_s(pid) for name, pid in self.pids.items()}

    def rss_mb(self) -> dict[str, float]:
        return {name: _rss_mb(pid) for name, pid in self.pids.items()}


def serve(step_s: float) -> None:
    """Serve until told to stop; prints the address."""
    config = engine_config({}, True)
    tokens = tick_tokens(Tokenizer(model_folder()))
    serve_model(
        config,
        ServerConfig(port=0),
        on_ready=lambda url: print(f"url {url}", flush=True),
        make_device=partial(paced_device, step_s, tokens),
    )


def model_folder() -> Path:
    """The built-in model's: only its tokenizer is used."""
    path = locate_model(engine_config({}, True)).model.model_path
    assert path is not None
    return Path(path)


@contextmanager
def serving(script: Path, step_s: float, is_bare: bool = False) -> Iterator[Served]:
    """Start `script --serve` and wait for its address; `is_bare`: what `bare.py` serves."""
    with started([sys.executable, str(script), "--serve-bare" if is_bare else "--serve", str(step_s)]) as served:
        yield served


@contextmanager
def started(command: list[str]) -> Iterator[Served]:
    """Start a server that prints its address; stopped politely in the end, and its exit code must be 0."""
    with subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
            yield Served(url, {"server": process.pid, **_engine_pid(process.pid)})
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"the server ended with {process.returncode}")


def _engine_pid(server_pid: int) -> dict[str, int]:
    """Of the server's children the one that runs the engine, and not Python's resource tracker; if it has one."""
    for task in Path(f"/proc/{server_pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                return {"engine": int(child)}
    return {}


def _cpu_s(pid: int) -> float:
    # In the user's and in the kernel's part, after a name that may hold spaces.
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6
