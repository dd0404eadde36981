"""For tests of services on a cluster: replicas of a device made of integers, and what a cluster has left."""

from __future__ import annotations

import os
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
from tests.runtime.cluster.clusters import RayNodes
from tests.runtime.services import SLOW, Listener
from tests.waiting import until

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
    service, listener = ray_service(config_on(nodes, **model), ServerConfig(), slow_device), Listener()
    service.start(listener)
    try:
        service.wait_until_ready()
        yield service, listener
    finally:
        service.stop()


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
