"""A workspace gives the memory in which adapters are put together, and keeps how files of a kind are packed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rota.engine.lora.host import HostAdapter, pinned, pinned_bytes, threads_for_reads
from rota.engine.lora.packing import Packing

# Of each kind of folder: some 30 kB.
MOST_PACKINGS = 64
# An adapter of a large rank is not kept room for.
MOST_BYTES = 256 << 20


def plain_bytes(size: int) -> Tensor:
    """[size] uint8, whatever they are now."""
    return torch.empty(size, dtype=torch.uint8)


class Workspace:
    """For one bank's adapters, from any thread. By default it is a CPU's, whose threads are the model's."""

    def __init__(
        self,
        threads: int = 1,
        packs: bool = False,
        pin: Callable[[HostAdapter, int], HostAdapter] | None = None,
        memory: Callable[[int], Tensor] = plain_bytes,
    ) -> None:
        """Adapters may stay packed if it `packs`, in `memory`. Others are copied by `pin`, or stay where they are."""
        self.threads, self.packs = threads, packs
        self.memory = memory
        self._pin = pin
        self._packings: dict[bytes, Packing] = {}  # the longest unused first
        self._left: Tensor | None = None  # in which the last adapter was put together
        self._lock = threading.Lock()

    def packing_for(self, fingerprint: bytes) -> Packing | None:
        """That of folders of this fingerprint, if one was kept."""
        with self._lock:
            if packing := self._packings.pop(fingerprint, None):
                self._packings[fingerprint] = packing
        return packing

    def keep(self, fingerprint: bytes, packing: Packing) -> Packing:
        """The same, with ranks from which copies can be made."""
        ranks = self.memory(packing.ranks.nbytes).view(torch.int32).view(packing.ranks.shape)
        kept = replace(packing, ranks=ranks.copy_(packing.ranks))
        with self._lock:
            self._packings[fingerprint] = kept
            while len(self._packings) > MOST_PACKINGS:
                del self._packings[next(iter(self._packings))]
        return kept

    def take(self, size: int) -> Tensor:
        """[size or more] uint8, whatever they are now: to put an adapter together in, until it is `done`."""
        with self._lock:
            left, self._left = self._left, None
        return plain_bytes(size) if left is None or len(left) < size else left

    def done(self, adapter: HostAdapter, memory: Tensor) -> HostAdapter:
        """The adapter where its copies are made from. If that is elsewhere, its memory is used again.

        New memory would be given to the process page by page while it is written, and taken from it with the lock of
        the interpreter held: 84 MB each time.
        """
        if self._pin is None:
            return adapter
        copy = self._pin(adapter, self.threads)
        with self._lock:
            self._left = memory if memory.nbytes <= MOST_BYTES else None
        return copy


PLAIN = Workspace()


def pinning_workspace(packs: bool) -> Workspace:
    """For a GPU: adapters end in pinned memory."""
    return Workspace(threads_for_reads(), packs, pinned, pinned_bytes)
