"""The engine's process sets up the server's logs before it builds anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rota.core.config import EngineConfig, ServerConfig
from rota.extensions import needed
from rota.observe.logs import set_up_logs
from rota.runtime.timeouts import EngineTimeouts
from rota.runtime.world import Device

MakeDevice = Callable[[EngineConfig], Device[Any]]


def build_logged(make_device: MakeDevice, config: EngineConfig, server: ServerConfig) -> Any:
    """Runs in the engine's process. A module of its own, so that this process loads no command line."""
    # Sooner than the supervisor, which does not know the ranks, would give up on all of them.
    timeouts = EngineTimeouts(silence_s=server.engine_silence_s / 2)
    if config.model.tensor_parallel_size == 1:
        return build_rank(make_device, server, config)
    ranks = needed("ranks", "--tensor-parallel-size")
    return ranks.build_ranks(partial(build_rank, make_device, server), config, timeouts)


def build_rank(make_device: MakeDevice, server: ServerConfig, config: EngineConfig) -> Any:
    """Runs in the process of each rank."""
    set_up_logs(server.log_format, server.log_level, config.quiet)
    return make_device(config)
