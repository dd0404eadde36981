"""A service on a cluster and its engines: it ends with the front's part of the cluster, and grows with it if asked."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.messages import Message
from rota.runtime.cluster.cluster import Cluster, ClusterPlace
from rota.runtime.cluster.records import EngineJob, Need, Sight
from rota.runtime.cluster.remote_engine import RemoteEngine
from rota.runtime.replicas.face import ReplicatedService
from rota.runtime.service import BuildDevice, Deliver, Service, ServiceState
from rota.runtime.watch import Death
from rota.runtime.wire import Record

# ── engine ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# An engine that runs at a place on the cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """Makes the engines of a service: each is another order to the same cluster."""

    cluster: Cluster
    need: Need
    versions: dict[str, str]
    facts: dict[str, str]
    threads: int | None

    def __call__(
        self, context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> PlacedEngine:
        job = EngineJob(
            versions=self.versions,
            facts=self.facts,
            engine=pickle.dumps((build_device, config)),
            threads=self.threads,
        )
        place = self.cluster.place(self.need, job)
        return PlacedEngine(RemoteEngine(context, place, self.cluster.host), place)


class PlacedEngine:
    """A remote engine, and why its place came to an end."""

    def __init__(self, engine: RemoteEngine, place: ClusterPlace) -> None:
        self._engine, self._place = engine, place

    @property
    def pid(self) -> int | None:
        return self._engine.pid

    def start(self) -> None:
        self._engine.start()

    def send(self, record: Record) -> None:
        self._engine.send(record)

    def watch(self, *how: Any) -> Death:
        death = self._engine.watch(*how)
        # A machine that refuses will do so again, like an engine that says why. Of another end that is not known.
        return replace(death, last_words=death.last_words or death.ending) if self._place.is_refused else death

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        self._engine.close()
        self._place.close()


# ── service ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A service on a cluster: it ends with the front's part of the cluster, and grows with it if that is asked for.

# How often a service that grows looks around, beside being told.
_LOOK_S = 60.0

NewReplica = Callable[[int], Service]


class ClusterService:
    """Another service, whose engines are on the cluster."""

    def __init__(self, service: Service, cluster: Cluster, growth: ReplicaGrowth | None = None) -> None:
        self._service, self._cluster, self._growth = service, cluster, growth

    @property
    def state(self) -> ServiceState:
        return self._service.state

    def start(self, deliver: Deliver) -> None:
        self._service.start(deliver)
        if self._growth:
            self._growth.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        return self._service.wait_until_ready(timeout_s)

    def send(self, message: Message) -> None:
        self._service.send(message)

    def stop(self) -> None:
        if self._growth:
            self._growth.stop()
        self._service.stop()
        self._cluster.close()


class ReplicaGrowth:
    """A thread that adds a replica for every place that the cluster has more."""

    def __init__(self, service: ReplicatedService, cluster: Cluster, need: Need, new_replica: NewReplica) -> None:
        self._service, self._cluster = service, cluster
        self._need, self._new_replica = need, new_replica
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._grow, name="rota-growth", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._cluster.look_again()
        self._thread.join()

    def _grow(self) -> None:
        while not self._stopping.is_set():
            self._cluster.wait_for(lambda sight: self._stopping.is_set() or self._room(sight) > 0, _LOOK_S)
            if not self._stopping.is_set() and self._room(self._cluster.sight) > 0:
                self._service.add(self._new_replica(len(self._service)))

    def _room(self, sight: Sight) -> int:
        return room(self._need, sight, len(self._service), self._cluster.pending)


def room(need: Need, sight: Sight, replicas: int, pending: int) -> int:
    """How many replicas more the cluster holds. What others use is not free, and what is pending takes it first."""
    return min(sight.holds(need) - replicas, sight.has_room_for(need) - pending)
