"""A pinned copier copies to a GPU on a stream of its own, from memory that the driver reads without the processor."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rota.engine.weights.read_ahead import Copier, Wait

# What copies to a device; None: tensors are copied from the memory map.
CopierFor = Callable[[torch.device], Copier | None]

# cudaHostRegisterPortable: pinned for every context, as torch pins.
PORTABLE = 1

LOG = logging.getLogger("rota.engine")


class PinnedCopier:
    """All that is computed in the `with` block runs on the copier's stream, so no copy waits for another thread's work.

    Buffers are registered with the driver, not taken from torch's allocator of pinned memory: that one keeps what is
    freed for ever, and only for requests of the same size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._stack.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            # An error of the device would be raised here once more, instead of the one that ended the block.
            with nullcontext() if kind is None else suppress(RuntimeError):
                self._stream.synchronize()
            for buffer in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            self._pinned.clear()

    def buffer(self, size: int) -> Tensor:
        """Memory that the driver does not pin is copied from too, but slowly."""
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # two buffers must share none
        # A compiler is forked meanwhile: without this, a write would go to a new page, and the GPU reads the old one.
        pages.madvise(mmap.MADV_DONTFORK)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            refused = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, PORTABLE))
        if refused:
            LOG.warning(f"The driver does not pin {size >> 20} MiB (CUDA error {refused}): weights are read slowly.")
        else:
            self._pinned.append(buffer)
        return buffer

    def copy(self, source: Tensor, target: Tensor) -> None:
        if source.dtype is not target.dtype:
            source = source.to(target.device, non_blocking=True)  # the device converts, as the processor would
        target.copy_(source, non_blocking=True)

    def mark(self) -> Wait:
        copied = torch.cuda.Event(blocking=True)  # a thread that waits sleeps
        copied.record(self._stream)

        def wait() -> None:
            with torch.cuda.device(self._device):  # else a thread makes a context on the first GPU
                copied.synchronize()

        return wait


def pinned_on_gpu(device: torch.device) -> Copier | None:
    """None on a CPU: there the memory map is copied from, and a buffer between would be one copy more."""
    return PinnedCopier(device) if device.type == "cuda" else None


def no_copier(_device: torch.device) -> None:
    """Every tensor is copied from the memory map, on any device."""
