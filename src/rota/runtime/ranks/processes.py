"""Which rank a process is, where rank 0 waits, and how rank 0 starts the other ranks of its machine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError
from rota.core.stages import AutotuneResult
from rota.runtime.children import deaf_children
from rota.runtime.lifeline import tied
from rota.runtime.ranks.meeting import MEET_S, MakeDevice
from rota.runtime.timeouts import KILL_S

# ── place ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# torchrun itself listens on MASTER_PORT; rank 0 waits for the other ranks on the port behind it.
_NEXT_PORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedProcess:
    """One of the processes that torchrun has started, on one machine or on several."""

    rank: int
    device_number: int
    local_ranks: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def torchrun_place(size: int, environ: Mapping[str, str]) -> LaunchedProcess | None:
    """What torchrun's environment says; None without one, and then rank 0 starts the others itself."""
    if size == 1 or not {"RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    world = _number(environ, "WORLD_SIZE")
    if world != size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but WORLD_SIZE is {world}: start {size} processes, or unset RANK and "
            "WORLD_SIZE to have them started here."
        )
    return LaunchedProcess(
        rank=_number(environ, "RANK"),
        device_number=_number(environ, "LOCAL_RANK", 0),
        local_ranks=_number(environ, "LOCAL_WORLD_SIZE", 1),
        host=environ.get("MASTER_ADDR") or _missing("MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT") + _NEXT_PORT,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    word = environ.get(name, "" if default is None else str(default))
    if not word:
        _missing(name)
    if not word.isdigit():
        raise ConfigError(f"{name} must be a whole number, not {word!r}.")
    return int(word)


def _missing(name: str) -> str:
    raise ConfigError(f"RANK and WORLD_SIZE are set, but {name} is not: start with torchrun, or unset both.")


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerJob:
    """What a follower must know before it meets the leader."""

    make_device: MakeDevice
    config: EngineConfig
    address: str
    secret: str = ""
    meet_s: float = MEET_S
    autotuned: tuple[AutotuneResult, ...] = ()  # what rank 0 was told of an engine before it


def start_follower(job: FollowerJob) -> subprocess.Popen[bytes]:
    """A follower in a process of its own; the thread that starts it must live as long as the process may."""
    # A program and not a fork of multiprocessing: the engine's process is a daemon, which may have no children.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "rota.runtime.ranks"]
    with deaf_children():
        process = subprocess.Popen(tied(command), stdin=subprocess.PIPE, env=environ)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # a process that died already says so itself
        stdin.write(pickle.dumps(job))
    return process


class FollowerProcesses:
    """The followers of one leader; none of them if torchrun starts them."""

    def __init__(self, jobs: Sequence[FollowerJob]) -> None:
        self._processes = {job.config.rank: start_follower(job) for job in jobs}

    def complaint(self) -> str:
        """About one that has ended. One that was killed comes first: others may have failed for lack of it."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        for rank, code in codes.items():
            if code is not None and code < 0:
                return f"The process of rank {rank} was killed by {signal.Signals(-code).name}."
        for rank, code in codes.items():
            if code is not None:
                return f"The process of rank {rank} ended with exit code {code}."
        return ""

    def killed(self, within_s: float) -> str:
        """About one that was killed, or is found killed in a moment; empty if none is."""
        ends_at = time.monotonic() + within_s
        while self._processes and time.monotonic() < ends_at:
            if any((process.poll() or 0) < 0 for process in self._processes.values()):
                return self.complaint()
            time.sleep(0.01)
        return ""

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def end(self) -> None:
        """A process inside a broken driver may never end."""
        self.kill()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
