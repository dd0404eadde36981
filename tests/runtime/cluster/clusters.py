"""For tests on a real Ray cluster: nodes on this machine, which a test kills and adds as it likes, and services."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rota.core.config import EngineConfig, ModelConfig, ServerConfig
from rota.core.events import FinishReason
from rota.runtime.cluster.cluster import Cluster
from rota.runtime.cluster.face import ray_service
from rota.runtime.service import Service, ServicePhase
from tests.builders import submit
from tests.fakes import FakeDevice, alphabet
from tests.processes import PIPE, Program, marked, started
from tests.runtime.services import SLOW, Listener, heard
from tests.waiting import line_of, until

PROGRAM = Path(__file__).with_name("nodes_program.py")


class RayNodes:
    """The head, which is a node too, and further nodes by number."""

    def __init__(self, program: Program, mark: str) -> None:
        self._program, self._mark = program, mark
        self.address = line_of(program).strip()

    def add(self, **devices: int) -> None:
        """One node; without a word about its devices it has one processor."""
        self._order("add", json.dumps(devices or {"num_cpus": 1}, separators=(",", ":")))

    def remove(self, number: int) -> None:
        """As if its machine were gone: its processes are killed."""
        self._order("remove", str(number))

    def stop_head(self) -> None:
        self._order("stop-head")

    def start_head(self) -> None:
        self._order("start-head")

    def engines(self) -> list[int]:
        """The processes of engines on any node."""
        return [pid for pid in marked(self._mark) if b"spawn_main" in _command(pid)]

    def _order(self, *words: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(" ".join(words) + "\n")
        self._program.stdin.flush()
        line_of(self._program, "done")


@contextmanager
def ray_nodes(
    number: int = 3, port: int = 0, processors: int = 1, environ: dict[str, str] | None = None, **settings: Any
) -> Iterator[RayNodes]:
    """A cluster of so many nodes with so many processors each. With the block all its processes end."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie there, and their paths must be short
    mark = f"ROTA_TEST_MARK={folder}"
    paths = os.pathsep.join(filter(None, sys.path))
    own = {"RAY_TMPDIR": folder, "PYTHONPATH": paths, "ROTA_TEST_MARK": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    command: list[str | Path] = [sys.executable, PROGRAM, str(number), str(processors), str(port), json.dumps(settings)]
    with (Path(folder) / "words").open("w") as words:
        try:
            with started(command, stdin=PIPE, stderr=words, env=os.environ | own | (environ or {})) as program:
                yield RayNodes(program, mark)
            assert until(lambda: not marked(mark)), "every process of the cluster ends with it"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ── services of replicas, each with a device made of integers ─────────────────────────────────────────────────────────

TOKENS = 100


def slow_device(_: EngineConfig, _server: ServerConfig | None = None) -> FakeDevice:
    """Slow enough that a request is under way when its machine is killed."""
    return SLOW()


def spelling_device(_: EngineConfig) -> FakeDevice:
    """Its answers are letters."""
    return FakeDevice(step_s=0.02, next_token=alphabet)


def config_on(nodes: RayNodes, **model: Any) -> EngineConfig:
    asked = {"data_parallel_size": 3, "cpu_threads": 1, **model}
    return EngineConfig(model=ModelConfig(data_parallel_backend="ray", ray_address=nodes.address, **asked))


@contextmanager
def served(nodes: RayNodes, **model: Any) -> Iterator[tuple[Service, Listener]]:
    """A service with three replicas, each on a node of its own, that is ready."""
    with heard(ray_service(config_on(nodes, **model), ServerConfig(), slow_device)) as (service, listener):
        service.wait_until_ready()
        yield service, listener


def all_serve(service: Service, replicas: int = 3) -> bool:
    return [one.phase for one in service.state.engines] == [ServicePhase.READY] * replicas


def free_again(nodes: RayNodes, processors: int = 3) -> bool:
    """Whether no reservation is left, as somebody else sees it."""
    watcher = Cluster(nodes.address)
    watcher.join()
    try:
        return until(lambda: watcher.sight.free_cpus == processors)
    finally:
        watcher.close()


def ask(service: Service, listener: Listener, number: int, name: str = "r", tokens: int = TOKENS) -> list[str]:
    """Requests of which each has begun."""
    names = [f"{name}{index}" for index in range(number)]
    for one in names:
        service.send(submit(one, max_new_tokens=tokens))
    for one in names:
        listener.wait_for_tokens(one)
    return names


def failed(listener: Listener, names: list[str]) -> list[str]:
    """Why requests ended that did not end as asked."""
    endings = [listener.wait_for_ending(name) for name in names]
    return [
        one.fault.message if one.fault else str(one.reason) for one in endings if one.reason is not FinishReason.LENGTH
    ]


def drivers() -> list[int]:
    """The drivers of fronts in this process."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for children in found for pid in children.read_text().split()]
    return [pid for pid in pids if b"rota.runtime.cluster" in Path(f"/proc/{pid}/cmdline").read_bytes()]
