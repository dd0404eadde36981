"""Replicas of a server on a Ray cluster: how many, what each needs, and who starts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rota.core.config import EngineConfig, ServerConfig
from rota.core.errors import ConfigError
from rota.core.ids import EngineId
from rota.runtime.blame import Blame
from rota.runtime.cluster.cluster import Cluster
from rota.runtime.cluster.joining import chosen_address, own_versions
from rota.runtime.cluster.records import Need, Sight, need_of, shortage
from rota.runtime.cluster.service import ClusterService, EngineMaker, ReplicaGrowth
from rota.runtime.ranks.face import facts
from rota.runtime.replicas.face import ReplicatedService, Router
from rota.runtime.service import Service
from rota.runtime.supervisor import AdapterLook, SupervisedService
from rota.runtime.timeouts import EngineTimeouts

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
    new_replica = Replicas(cluster, need, config, server, build, first, blame)
    engines = [new_replica(number) for number in range(replicas)]
    router = Router(replicas, has_prefix_cache=config.scheduler.enable_prefix_caching)
    if config.model.data_parallel_size == "auto":
        service = ReplicatedService(engines, router)
        return ClusterService(service, cluster, ReplicaGrowth(service, cluster, need, new_replica))
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


class Replicas:
    """Makes one replica after the other."""

    def __init__(
        self,
        cluster: Cluster,
        need: Need,
        config: EngineConfig,
        server: ServerConfig,
        build: Build,
        first: AdapterLook | None = None,
        blame: Blame | None = None,
    ) -> None:
        sharers = cluster.sight.most_on_one(need)
        model = replace(config.model, device="cuda" if need.gpus else "cpu", data_parallel_size=sharers)
        self._config = replace(config, model=model)
        self._timeouts = EngineTimeouts(silence_s=server.engine_silence_s)
        # An engine needs nothing else of the server, and least of all its keys.
        self._server = ServerConfig(
            engine_silence_s=server.engine_silence_s, log_format=server.log_format, log_level=server.log_level
        )
        self._build, self._first, self._blame = build, first, blame
        self._maker = EngineMaker(
            cluster=cluster,
            need=need,
            versions=own_versions(),
            facts=facts(self._config),
            threads=need.cpus * sharers or None,
        )

    def __call__(self, number: int) -> Service:
        config = replace(self._config, engine_id=EngineId(number), quiet=True)  # its progress is not shown here
        build_device = partial(self._build, config, self._server)
        return SupervisedService(build_device, config, self._timeouts, self._maker, self._first, self._blame)
