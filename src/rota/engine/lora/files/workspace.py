"""A workspace is where adapters are put together before they lie in the memory from which they are copied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rota.engine.lora.files.filling import Filling
from rota.engine.lora.files.folder import AdapterFolder
from rota.engine.lora.files.tensor_file import TensorFile
from rota.engine.lora.host import HostAdapter, StackedSite, pinned, pinned_bytes, threads_for_reads
from rota.engine.lora.packing import Packing

# ── load template ───────────────────────────────────────────────────────────────────────────────────────────────────
# A load template is the memory in which an adapter is put together, and the way in which a folder's files fill it.
#
# Folders with the same config and the same headers, to the byte, share a load template: all versions that a
# training run saves, and all adapters of one recipe. Then nothing is parsed or checked again but the numbers.


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTemplate:
    """For one adapter at a time."""

    fingerprint: bytes
    run: Tensor
    scratch: Tensor
    sites: list[StackedSite]  # of the run
    site_ranks: tuple[int, ...]
    ranks: Tensor
    filling: Filling
    is_plain: bool  # nothing but factors of layers was in the folder

    @property
    def is_enough(self) -> bool:
        """Need a folder's headers not be understood?"""
        return self.is_plain and self.filling.is_quick

    @property
    def size_bytes(self) -> int:
        return self.run.nbytes + self.scratch.nbytes

    def fill(self, files: Sequence[TensorFile], folder: AdapterFolder | None) -> bool:
        """False if numbers are not finite. Blocks on the disk. The folder is needed unless `is_enough`."""
        return self.filling.run(files, folder)


# Two readers may be at work, and an adapter of a large rank is not kept room for.
MOST_KEPT, MOST_BYTES = 2, 384 << 20
# Of each kind of folder: some 30 kB.
MOST_PACKINGS = 64


class Workspace:
    """New memory for every adapter, which stays the adapter's. For a CPU: its threads are the model's."""

    threads = 1
    # May adapters stay packed?
    packs = False

    def packing_for(self, fingerprint: bytes) -> Packing | None:  # noqa: ARG002
        """That of folders of this fingerprint, if one was kept."""
        return None

    def keep(self, fingerprint: bytes, packing: Packing) -> Packing:  # noqa: ARG002
        """The same, with ranks from which copies can be made."""
        return packing

    def memory(self, size: int) -> Tensor:
        """[size] uint8 that an adapter keeps."""
        return torch.empty(size, dtype=torch.uint8)

    def claim(self, fingerprint: bytes) -> LoadTemplate | None:  # noqa: ARG002
        """A load template for folders of this fingerprint, which is the caller's until the adapter is done."""
        return None

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many numbers, whatever they are now."""
        return torch.empty(count, dtype=dtype)

    def done(self, adapter: HostAdapter, template: LoadTemplate) -> HostAdapter:  # noqa: ARG002
        """An adapter that was put together in a load template, where its copies are made from."""
        return adapter


class PinningWorkspace(Workspace):
    """Adapters end in pinned memory, so the memory in which they are put together is used again.

    New memory would be given to the process page by page while it is written, and taken from it with the lock of the
    interpreter held: 84 MB each time.
    """

    def __init__(
        self,
        pin: Callable[[HostAdapter, int], HostAdapter] = pinned,
        packs: bool = False,
        memory: Callable[[int], Tensor] = pinned_bytes,
    ) -> None:
        self.threads = threads_for_reads()
        self.packs = packs
        self._pin, self._memory = pin, memory
        self._packings: dict[bytes, Packing] = {}  # the longest unused first
        self._templates: list[LoadTemplate] = []  # the longest unused first
        self._left: list[Tensor] = []  # memory of load templates that were given up
        self._lock = threading.Lock()

    def packing_for(self, fingerprint: bytes) -> Packing | None:
        with self._lock:
            if packing := self._packings.pop(fingerprint, None):
                self._packings[fingerprint] = packing
        return packing

    def keep(self, fingerprint: bytes, packing: Packing) -> Packing:
        ranks = self._memory(packing.ranks.nbytes).view(torch.int32).view(packing.ranks.shape)
        kept = replace(packing, ranks=ranks.copy_(packing.ranks))
        with self._lock:
            self._packings[fingerprint] = kept
            while len(self._packings) > MOST_PACKINGS:
                del self._packings[next(iter(self._packings))]
        return kept

    def memory(self, size: int) -> Tensor:
        return self._memory(size)

    def claim(self, fingerprint: bytes) -> LoadTemplate | None:
        with self._lock:
            for template in self._templates:
                if template.fingerprint == fingerprint:
                    self._templates.remove(template)
                    return template
            if len(self._templates) >= MOST_KEPT:
                given_up = self._templates.pop(0)
                self._left = [_whole(given_up.run), _whole(given_up.scratch)]
        return None

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        with self._lock:
            for memory in self._left:
                if memory.nbytes >= size:
                    self._left = [one for one in self._left if one is not memory]
                    return memory[:size].view(dtype)
        return torch.empty(size, dtype=torch.uint8).view(dtype)

    def done(self, adapter: HostAdapter, template: LoadTemplate) -> HostAdapter:
        copy = self._pin(adapter, self.threads)
        with self._lock:
            if template.size_bytes <= MOST_BYTES and len(self._templates) < MOST_KEPT:
                self._templates.append(template)
        return copy


def _whole(part: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())


PLAIN = Workspace()
