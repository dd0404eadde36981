"""Replicas of a server on a Ray cluster: how many, what each needs, who starts them, and a service that grows."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.core.ids import EngineId
from rota.core.messages import Message
from rota.runtime.blame import Blame
from rota.runtime.cluster.cluster import Cluster, ClusterPlace
from rota.runtime.cluster.joining import chosen_address, own_versions
from rota.runtime.cluster.records import EngineJob, Need, Sight, need_of, shortage
from rota.runtime.cluster.remote_engine import RemoteEngine
from rota.runtime.ranks.face import facts
from rota.runtime.replicas.face import ReplicatedService, Router
from rota.runtime.service import BuildDevice, Deliver, Service, ServiceState
from rota.runtime.supervisor import AdapterLook, SupervisedService
from rota.runtime.timeouts import EngineTimeouts

# ── service ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A service on a cluster: it ends with the front's part of the cluster, and grows with it if that is asked for.

# How often a service that grows looks around, beside being told.
_LOOK_S = 60.0

NewReplica = Callable[[int], Service]


class ClusterService:
    """Another service, whose engines are on the cluster."""

    def __init__(self, service: Service, cluster: Cluster) -> None:
        self._service, self._cluster = service, cluster

    @property
    def state(self) -> ServiceState:
        return self._service.state

    def start(self, deliver: Deliver) -> None:
        self._service.start(deliver)

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        return self._service.wait_until_ready(timeout_s)

    def send(self, message: Message) -> None:
        self._service.send(message)

    def stop(self) -> None:
        self._service.stop()
        self._cluster.close()


class GrowingService(ClusterService):
    """A thread adds a replica for every place that the cluster has more."""

    def __init__(self, replicas: ReplicatedService, cluster: Cluster, need: Need, new_replica: NewReplica) -> None:
        super().__init__(replicas, cluster)
        self._replicas, self._need, self._new_replica = replicas, need, new_replica
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._grow, name="rota-growth", daemon=True)

    def start(self, deliver: Deliver) -> None:
        super().start(deliver)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._cluster.look_again()
        self._thread.join()
        super().stop()

    def _grow(self) -> None:
        while not self._stopping.is_set():
            self._cluster.wait_for(lambda sight: self._stopping.is_set() or self._room(sight) > 0, _LOOK_S)
            if not self._stopping.is_set() and self._room(self._cluster.sight) > 0:
                self._replicas.add(self._new_replica(len(self._replicas)))

    def _room(self, sight: Sight) -> int:
        return room(self._need, sight, len(self._replicas), self._cluster.pending)


def room(need: Need, sight: Sight, replicas: int, pending: int) -> int:
    """How many replicas more the cluster holds. What others use is not free, and what is pending takes it first."""
    return min(sight.holds(need) - replicas, sight.has_room_for(need) - pending)


# ── ray service ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The service of a server whose replicas are on Ray: what one replica needs, and how many there are.

# Builds the device of an engine, in the engine's process. It travels there.
Build = Callable[[EngineConfig, ServerConfig], Any]

# Machines of a cluster that has just been started come one after the other.
FIT_S = 10.0


def ray_service(
    config: EngineConfig,
    server: ServerConfig,
    build: Build,
    fit_s: float = FIT_S,
    first: AdapterLook | None = None,
    blame: Blame | None = None,
) -> Service:
    """The service of a server, its replicas on the cluster. Raises ConfigError if there is none that fits."""
    if config.policy.prefill_delayer_exchange != "auto":
        raise ConfigError(
            f"prefill_delayer_exchange is '{config.policy.prefill_delayer_exchange}', but replicas on Ray share no "
            "memory to exchange reports in; leave it out."
        )
    if server.spare_engine == "on":
        raise ConfigError(
            "spare_engine is 'on', but the next engine on Ray may run on another machine, where no spare waits; leave "
            "it out."
        )
    cluster = Cluster(chosen_address(config.model.ray_address))
    cluster.join()
    try:
        need, replicas = settle(cluster, config, fit_s)
    except ConfigError:
        cluster.close()
        raise
    new_replica = replica_maker(cluster, need, config, server, build, first, blame)
    engines = [new_replica(number) for number in range(replicas)]
    router = Router(replicas, has_prefix_cache=config.scheduler.enable_prefix_caching)
    if config.model.data_parallel_size == "auto":
        return GrowingService(ReplicatedService(engines, router), cluster, need, new_replica)
    return ClusterService(engines[0] if replicas == 1 else ReplicatedService(engines, router), cluster)


def settle(cluster: Cluster, config: EngineConfig, fit_s: float) -> tuple[Need, int]:
    """What one replica needs, and how many there are to be; raises ConfigError if the cluster holds fewer."""
    asked = config.model.data_parallel_size
    least = 1 if asked == "auto" else asked

    def lack(sight: Sight) -> str:
        return shortage(need_of(config.model, sight), least, sight)

    cluster.wait_for(lambda sight: not lack(sight), fit_s)
    sight = cluster.sight
    if reason := lack(sight):
        raise ConfigError(f"The Ray cluster at {cluster.address} does not fit. {reason}")
    need = need_of(config.model, sight)
    return need, max(1, min(sight.holds(need), sight.has_room_for(need))) if asked == "auto" else asked


def replica_maker(
    cluster: Cluster,
    need: Need,
    config: EngineConfig,
    server: ServerConfig,
    build: Build,
    first: AdapterLook | None,
    blame: Blame | None,
) -> NewReplica:
    """Makes one replica after the other, by number."""
    sharers = cluster.sight.most_on_one(need)
    model = replace(config.model, device="cuda" if need.gpus else "cpu", data_parallel_size=sharers)
    config = replace(config, model=model, quiet=True)  # the progress of engines is not shown here
    timeouts = EngineTimeouts(silence_s=server.engine_silence_s)
    # An engine needs nothing else of the server, and least of all its keys.
    server = ServerConfig(
        engine_silence_s=server.engine_silence_s, log_format=server.log_format, log_level=server.log_level
    )
    threads = need.cpus * sharers or None
    own, found = own_versions(), facts(config)

    def new_engine(
        context: zmq.Context[zmq.Socket[bytes]], build_device: BuildDevice, config: EngineConfig
    ) -> RemoteEngine:
        job = EngineJob(versions=own, facts=found, engine=pickle.dumps((build_device, config)), threads=threads)
        return RemoteEngine(context, ClusterPlace(cluster, need, job), cluster.host)

    def new_replica(number: int) -> Service:
        numbered = replace(config, engine_id=EngineId(number))
        return SupervisedService(partial(build, numbered, server), numbered, timeouts, new_engine, first, blame)

    return new_replica
