"""Engines of a server under test on a real Ray cluster of three nodes, which lasts as long as the test run."""

from __future__ import annotations

import atexit
import pickle
from contextlib import ExitStack
from functools import cache
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.runtime.cluster.alike import own_versions
from rota.runtime.cluster.cluster import Cluster
from rota.runtime.cluster.engine import Maker, PlacedEngine
from rota.runtime.cluster.needs import Need
from rota.runtime.ranks.facts import facts
from rota.runtime.service import BuildDevice
from rota.runtime.world import Device
from tests.fakes import FakeDevice
from tests.runtime.cluster.clusters import ray_nodes

# Room for two servers with three replicas each: the places of one may still be given back while the next starts.
PROCESSORS = 2


class Packed:
    """What builds a device, also where that is a function inside a test."""

    def __init__(self, build_device: BuildDevice) -> None:
        from ray import cloudpickle

        self._bytes = cloudpickle.dumps(build_device)

    def __call__(self) -> Device[Any]:
        device: Device[Any] = pickle.loads(self._bytes)()
        return device


def packed_device(build_device: BuildDevice) -> Packed | None:
    """None for a device that the test itself holds, to look at it or to let it go on: no other node can have it."""
    cells = getattr(build_device, "__closure__", None) or ()
    if any(isinstance(cell.cell_contents, FakeDevice) for cell in cells):
        return None
    try:
        return Packed(build_device)
    except TypeError:  # it has a lock, or an event, that the test holds
        return None


class CountingMaker:
    """Makes engines on the cluster, and says at the end how many there were."""

    def __init__(self) -> None:
        self.made = 0
        atexit.register(lambda: print(f"{self.made} engines were placed on Ray."))

    def __call__(
        self, context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> PlacedEngine:
        self.made += 1
        make = Maker(cluster=cluster(), need=Need(cpus=1), versions=own_versions(), facts=facts(config), threads=1)
        return make(context, build_device, config)


@cache
def maker() -> CountingMaker:
    return CountingMaker()


@cache
def cluster() -> Cluster:
    stack = ExitStack()
    atexit.register(stack.close)
    nodes = stack.enter_context(ray_nodes(3, processors=PROCESSORS))
    found = Cluster(nodes.address)
    found.join()
    stack.callback(found.close)
    return found
