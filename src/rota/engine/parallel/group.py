"""A group is the ranks that share one copy of a model: they add up, gather and agree.

All ranks must make the same calls in the same order. They do, because every rank carries out the same plans, and a
plan alone decides what a step computes and how it is padded.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rota.core.errors import ConfigError

# For a rank that reads its weights from a slower disk; one that hangs in a step is ended long before by its supervisor.
PATIENCE = timedelta(minutes=10)
LOOPBACK = ("tcp://127.", "tcp://localhost:", "file://")


class RankGroup:
    """What ranks do together. Here they are a group of one, which has nothing to do; others inherit from it."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x; may be x itself, overwritten."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[size, …] every rank's x, on all ranks."""
        return x[None]

    def tokens(self, tokens: Tensor) -> Tensor:
        """Rank 0's tokens, on all ranks; the others give a tensor of the same length, which may be overwritten."""
        return tokens

    def least(self, number: int) -> int:
        """The least of the ranks' numbers; waits for all ranks."""
        return number

    def close(self) -> None:
        """Leave the others."""


ONE_RANK = RankGroup()


class GlooGroup(RankGroup):
    """Ranks on CPUs."""

    def __init__(self, rank: int, size: int, meeting: str) -> None:
        super().__init__(rank, size)
        meet(rank, size, meeting)

    def sum(self, x: Tensor) -> Tensor:
        # In float32, whatever the model's precision: gloo does not add every precision, and sums lose digits.
        total = x.float().contiguous()
        dist.all_reduce(total)
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype)
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    def tokens(self, tokens: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        dist.broadcast(tokens, 0)
        return tokens

    def least(self, number: int) -> int:
        return least_of(number)

    def close(self) -> None:
        part()


def meet(rank: int, size: int, meeting: str) -> None:
    """Make the process's gloo group, over which hosts agree."""
    if meeting.startswith(LOOPBACK):
        # Ranks on one machine are not to be reached from others, and need no name for it that resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_initialized():
        raise ConfigError(
            "This process is in a group of torch.distributed already, for instance of another LLM with "
            "tensor_parallel_size; close that LLM first, or leave the group."
        )
    # Under torchrun: or rank 0, too, would look here for the store of torchrun, which is elsewhere.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=PATIENCE)


def least_of(number: int) -> int:
    """Over the process's gloo group."""
    told = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return int(told)


def part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
