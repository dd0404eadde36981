"""Engines of a server under test on a real Ray cluster of three nodes, which lasts as long as the test run."""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import zmq

from rota.core.config import EngineConfig
from rota.runtime.cluster.cluster import Cluster, ClusterPlace
from rota.runtime.cluster.joining import own_versions
from rota.runtime.cluster.records import EngineJob, Need
from rota.runtime.cluster.remote_engine import RemoteEngine
from rota.runtime.ranks.meeting import facts
from rota.runtime.service import BuildDevice
from rota.runtime.world import Device
from tests.fakes import FakeDevice
from tests.runtime.cluster.clusters import ray_nodes

# Room for four servers with three replicas each. A file of tests may have several at a time, and the places of one may
# still be given back while the next starts.
PROCESSORS = 4
NODES_S = 120.0
# The variable with the name of a file that gets a mark for every engine that is placed.
PLACED = "ROTA_TEST_PLACED"


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


def placed(context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig) -> RemoteEngine:
    """An engine on the cluster; it leaves a mark in the file PLACED, if a test wants to count them."""
    if path := os.environ.get(PLACED):
        with Path(path).open("a") as file:
            file.write(".")
    engine = pickle.dumps((build_device, config))
    job = EngineJob(versions=own_versions(), facts=facts(config), engine=engine, threads=1)
    return RemoteEngine(context, ClusterPlace(cluster(), Need(cpus=1), job), cluster().host)


@cache
def cluster() -> Cluster:
    """Its nodes end with the thread that starts them, which must not be a test's."""
    started: Future[Cluster] = Future()
    threading.Thread(target=_keep, args=(started,), name="ray-nodes", daemon=True).start()
    return started.result(NODES_S)


def _keep(started: Future[Cluster]) -> None:
    stack, is_over = ExitStack(), threading.Event()
    try:
        nodes = stack.enter_context(ray_nodes(3, processors=PROCESSORS))
        found = Cluster(nodes.address)
        found.join()
        stack.callback(found.close)
        atexit.register(stack.close)
        started.set_result(found)
    except Exception as error:
        stack.close()
        started.set_exception(error)
    else:
        is_over.wait()
