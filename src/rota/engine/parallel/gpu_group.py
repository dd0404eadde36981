"""Ranks on GPUs add up in memory that all of them see, small sums in one kernel; NCCL adds large ones.

    one-shot sum    each rank writes its part to its buffer, waits for the others, and reads all buffers

Both are captured into a step's graph. The hosts agree over gloo, before the first step. Ranks whose GPUs do not see
each other's memory, on other machines for instance, leave all sums to NCCL.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rota.engine.parallel.group import ONE_RANK, GlooGroup, RankGroup, least_of, meet, part

# Up to here a rank reads all buffers sooner than NCCL has started: 64 tokens of 4,096 numbers in bfloat16 are half of
# this. Two GPUs were not at hand to measure where NCCL becomes the faster one.
ONE_SHOT_BYTES = 1 << 20
# What torch's kernel adds.
SUMMED = (torch.float32, torch.bfloat16)


class OneShot:
    """A buffer in every rank that all ranks read, and torch's kernel that adds them up."""

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device) -> None:
        # Imported here: a build of torch without CUDA need not have it.
        import torch.distributed._symmetric_memory as symmetric

        self._name = ranks.group_name
        self._buffer: Tensor = symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, ranks)

    def __call__(self, x: Tensor) -> Tensor:
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if x.is_contiguous() and x.storage_offset() == 0:
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", self._name)
            return total
        # The kernel copies only what is in one piece. The sum before this one has ended on all ranks: its last act is
        # to wait until the others have read.
        shared.copy_(x)
        total = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)
        return total


class GPUGroup(RankGroup):
    """One-shot sums where there are any, and NCCL beside them, which connects at its first sum."""

    def __init__(self, rank: int, size: int, one_shot: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__(rank, size)
        self._one_shot = one_shot
        self._nccl = dist.new_group(backend="nccl")

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, meeting: str) -> GPUGroup:
        meet(rank, size, meeting)
        world = dist.group.WORLD
        assert world is not None, "the ranks have met"
        return cls(rank, size, OneShot(world, device) if see_each_other(size, device) else None)

    def sum(self, x: Tensor) -> Tensor:
        if self._one_shot is not None and is_small(x.nbytes, x.dtype):
            return self._one_shot(x)
        total = x.contiguous()
        dist.all_reduce(total, group=self._nccl)
        return total

    def gather(self, x: Tensor) -> Tensor:
        shape = (self.size, *x.shape)
        if self._one_shot is not None and is_small(self.size * x.nbytes, x.dtype):
            # Each rank writes its own part, and the sum adds zeros.
            parts = torch.zeros(shape, dtype=x.dtype, device=x.device)
            parts[self.rank] = x
            return self._one_shot(parts)
        gathered = torch.empty(shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self._nccl)
        return gathered

    def tokens(self, tokens: Tensor) -> Tensor:
        # A float32 counts exactly up to 2**24, more than any vocabulary.
        numbers = tokens.float() if self.rank == 0 else torch.zeros_like(tokens, dtype=torch.float32)
        return self.sum(numbers).to(torch.int64)

    def least(self, number: int) -> int:
        return least_of(number)

    def close(self) -> None:
        torch.cuda.synchronize()
        part()


def see_each_other(size: int, device: torch.device) -> bool:
    """Does every rank's GPU read the memory of all others? Asked on every rank; all get the same answer."""
    own = (socket.gethostname(), device.index)
    places: list[tuple[str, int]] = [own] * size
    dist.all_gather_object(places, own)
    others = [number for _, number in places if number != device.index]
    is_one_machine = all(host == own[0] for host, _ in places)
    sees = is_one_machine and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    return least_of(sees) == 1


def is_small(size: int, dtype: torch.dtype) -> bool:
    """Is a sum of so many bytes one kernel? The kernel reads four bytes at a time, or more."""
    return size <= ONE_SHOT_BYTES and size % 4 == 0 and dtype in SUMMED


def join(rank: int, size: int, device: torch.device, meeting: str) -> RankGroup:
    """Meet the other ranks at an address such as tcp://127.0.0.1:29500; waits for them."""
    if size == 1:
        return ONE_RANK
    if device.type == "cpu":
        return GlooGroup(rank, size, meeting)
    return GPUGroup.join(rank, size, device, meeting)
