"""A place is a folder of shared memory where replicas exchange reports: the server makes it, the engines open it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rota.core.config import EngineConfig
from rota.core.errors import ConfigError
from rota.policy.prefill_delayer import Alone, Exchange
from rota.runtime.exchange.all_gather import MOST_RANKS, AllGather
from rota.runtime.exchange.board import WORDS, Board
from rota.runtime.exchange.lines import Lines

# Memory, where there is such a folder: a write to a file on a disk would be written to the disk too, later.
_MEMORY = Path("/dev/shm")


@contextmanager
def exchange_place(config: EngineConfig, replicas: int) -> Iterator[EngineConfig]:
    """The config of all replicas, with a place to exchange reports while the block lasts, if they need one."""
    if replicas == 1 or not config.policy.enable_prefill_delayer:
        yield config
        return
    is_gathered = config.policy.prefill_delayer_exchange == "all-gather"
    if is_gathered and replicas > MOST_RANKS:
        raise ConfigError(
            f"prefill_delayer_exchange is 'all-gather', but at most {MOST_RANKS} replicas can wait for each other in "
            f"every pass, and there are {replicas}; take 'board'."
        )
    folder = Path(tempfile.mkdtemp(prefix="rota-", dir=_MEMORY if _MEMORY.is_dir() else None))
    try:
        if is_gathered:
            AllGather.create(folder, replicas)
        else:
            Lines.create(folder / "board", replicas, WORDS)
        yield replace(config, exchange_at=str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_exchange(config: EngineConfig) -> Exchange:
    """This replica's side of the place."""
    if not config.exchange_at:
        return Alone()
    folder, rank = Path(config.exchange_at), int(config.engine_id)
    if config.policy.prefill_delayer_exchange == "all-gather":
        return AllGather(folder, rank)
    return Board(folder / "board", rank)


def caller_of(exchange: Exchange) -> AllGather | None:
    """Who may want a pass of an idle loop: other ranks, where every pass waits for all."""
    return exchange if isinstance(exchange, AllGather) else None
