"""A workspace is where adapters are put together before they lie in the memory from which they are copied."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.lora.host import HostAdapter, pinned
from rota.engine.lora.side_by_side import threads_for_reads

# Two readers may be at work, and an adapter of a large rank is not kept room for.
MOST_KEPT, MOST_BYTES = 2, 256 << 20


class Workspace:
    """New memory for every adapter, which stays the adapter's. For a CPU: its threads are the model's."""

    threads = 1

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers, whatever they are now."""
        return torch.empty(count, dtype=dtype)

    def done(self, adapter: HostAdapter) -> HostAdapter:
        """An adapter whose run was taken from here, where its copies are made from."""
        return adapter


class PinningWorkspace(Workspace):
    """Adapters end in pinned memory, so the memory in which they are put together is used again.

    New memory would be given to the process page by page while it is written, and taken from it with the lock of the
    interpreter held: 84 MB each time.
    """

    def __init__(self) -> None:
        self.threads = threads_for_reads()
        self._left: list[Tensor] = []  # lists are safe between threads

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        for _ in range(len(self._left)):
            try:
                memory = self._left.pop(0)
            except IndexError:
                break
            if memory.nbytes >= size:
                return memory[:size].view(dtype)
        return torch.empty(size, dtype=torch.uint8).view(dtype)

    def done(self, adapter: HostAdapter) -> HostAdapter:
        copy = pinned(adapter, self.threads)
        (run,) = adapter.pieces
        memory = torch.empty(0, dtype=torch.uint8).set_(run.untyped_storage())
        if len(self._left) < MOST_KEPT and memory.nbytes <= MOST_BYTES:
            self._left.append(memory)
        return copy


PLAIN = Workspace()
