"""The engines of a server: one, or as many replicas as there are to be copies of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rota.commands.logged import build_logged
from rota.core.config import EngineConfig, ServerConfig
from rota.core.ids import EngineId
from rota.runtime.patience import Patience
from rota.runtime.replicas.service import ReplicatedService
from rota.runtime.routing.router import Router
from rota.runtime.service import Service
from rota.runtime.supervisor import SupervisedService
from rota.runtime.world import Device

MakeDevice = Callable[[EngineConfig], Device[Any]]


def engine_service(config: EngineConfig, server: ServerConfig, make_device: MakeDevice) -> Service:
    """The service of a server, each engine in a process of its own."""
    patience = Patience(silence_s=server.engine_silence_s)
    engines = [
        SupervisedService(partial(build_logged, make_device, one, server), one, patience)
        for one in replica_configs(config)
    ]
    if len(engines) == 1:
        return engines[0]
    return ReplicatedService(engines, Router(len(engines), has_prefix_cache=config.scheduler.enable_prefix_caching))


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """The config of each replica: its number, and the first of its devices."""
    size = config.model.tensor_parallel_size
    return [
        replace(
            config,
            engine_id=EngineId(number),
            device_number=config.device_number + number * size,
            quiet=config.quiet or number > 0,  # progress bars of several processes would overwrite each other
        )
        for number in range(config.model.data_parallel_size)
    ]


def described_replicas(config: EngineConfig) -> str:
    """How many copies of the model serve; empty if there is one."""
    replicas = config.model.data_parallel_size
    return f"{replicas} replicas of the model share the requests." if replicas > 1 else ""
