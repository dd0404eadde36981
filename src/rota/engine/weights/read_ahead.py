"""Threads read tensors ahead into a ring of buffers, and one thread copies them to the device in their order."""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut
from rota.engine.weights.shards import FileRange

# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A run is what one buffer holds: small tensors together, or a piece of a large one.

# In bytes: a piece begins where numbers of any precision may begin, whatever its place in the file.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPiece:
    """A tensor's bytes in a buffer: [at, at + size) of it, which are [start, start + size) of the file."""

    name: str
    path: Path
    start: int
    size: int
    at: int


Run = tuple[RingPiece, ...]


def cut_into_runs(places: Mapping[str, FileRange], buffer_bytes: int) -> list[Run]:
    """The tensors in their order; only what does not fit into the rest of a buffer is cut."""
    assert buffer_bytes % ALIGNMENT == 0, "a cut would fall into a number"
    runs: list[list[RingPiece]] = []
    at = buffer_bytes
    for name, place in places.items():
        start = place.start
        while start < place.end:
            if at == buffer_bytes:
                runs.append([])
                at = 0
            size = min(place.end - start, buffer_bytes - at)
            runs[-1].append(RingPiece(name=name, path=place.path, start=start, size=size, at=at))
            start += size
            at += -(-size // ALIGNMENT) * ALIGNMENT
    return [tuple(run) for run in runs]


# ── pinned copier ───────────────────────────────────────────────────────────────────────────────────────────────────
# It copies to a GPU on a stream of its own, from memory that the driver reads without the processor.

# Returns when the copies that it was made behind are complete.
Wait = Callable[[], None]
# cudaHostRegisterPortable: pinned for every context, as torch pins.
PORTABLE = 1

LOG = logging.getLogger("rota.engine")


class PinnedCopier:
    """Owns the buffers, and copies from them to a GPU; the end of the `with` block gives all buffers back.

    All that is computed in the block runs on the copier's stream, so no copy waits for another thread's work. Buffers
    are registered with the driver, not taken from torch's allocator of pinned memory: that one keeps what is freed for
    ever, and only for requests of the same size.
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
        """[size] uint8 in host memory; from any thread. What the driver does not pin is copied from too, but slowly."""
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
        """Start to copy a part of a buffer into a tensor of as many numbers, in the target's precision."""
        if source.dtype is not target.dtype:
            source = source.to(target.device, non_blocking=True)  # the device converts, as the processor would
        target.copy_(source, non_blocking=True)

    def mark(self) -> Wait:
        """What waits, in any thread, for all copies that were started so far."""
        copied = torch.cuda.Event(blocking=True)  # a thread that waits sleeps
        copied.record(self._stream)

        def wait() -> None:
            with torch.cuda.device(self._device):  # else a thread makes a context on the first GPU
                copied.synchronize()

        return wait


# What copies to a device; None: tensors are copied from the memory map.
CopierFor = Callable[[torch.device], PinnedCopier | None]


def pinned_on_gpu(device: torch.device) -> PinnedCopier | None:
    """None on a CPU: there the memory map is copied from, and a buffer between would be one copy more."""
    return PinnedCopier(device) if device.type == "cuda" else None


def no_copier(_device: torch.device) -> None:
    """Every tensor is copied from the memory map, on any device."""


# ── ring ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# Copies a checked tensor, or a stretch of it, into the target, to its device and precision.
Copy = Callable[[str, Tensor, Cut | None], None]
# Reads into the buffers from a place in a file on, as `os.preadv` does; without Python's lock.
Read = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSetup:
    """How many threads read, into how many buffers, and by what (decision 0020)."""

    threads: int = 8
    buffers: int = 16
    buffer_bytes: int = 32 << 20
    read: Read = os.preadv


USUAL_SETUP = RingSetup()


class WeightRing:
    """Tensors that have a place are read ahead, in the order of the places. All others are copied from elsewhere.

    A run is ordered together with a buffer for it. So the oldest run that is not taken always has a buffer, and no
    order of reads and copies can stop the ring.

    The thread that asks for tensors is the one that starts the copies: it has allocated the target, and whatever it
    computes next on the device comes behind the copy.
    """

    def __init__(
        self, places: Mapping[str, FileRange], copier: PinnedCopier, setup: RingSetup, elsewhere: Copy
    ) -> None:
        self._places = places
        self._copier = copier
        self._setup = setup
        self._elsewhere = elsewhere
        self._coming = deque(places)
        self._files: dict[Path, int] = {}
        self._threads = ThreadPoolExecutor(setup.threads, "rota-weights")
        self._stack = ExitStack()
        self._unordered = deque(cut_into_runs(places, setup.buffer_bytes))
        self._ordered: deque[tuple[Run, Future[Tensor]]] = deque()
        # The run that is being copied: its buffer, and the pieces that are left.
        self._buffer: Tensor | None = None
        self._pieces: deque[RingPiece] = deque()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # The threads end first, then the files are closed, then their buffers go.
            stack.enter_context(self._copier)
            for path in {piece.path for run in self._unordered for piece in run}:
                self._files[path] = _opened(path, stack)
            stack.callback(self._threads.shutdown, cancel_futures=True)
            for _ in range(self._setup.buffers):
                self._order_next()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buffer = None
        self._stack.__exit__(kind, error, trace)
        self._ordered.clear()

    def copy(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """A tensor that is asked for out of turn comes from elsewhere too: slow, but never wrong."""
        if not self._coming or self._coming[0] != name or not target.is_contiguous():
            self._elsewhere(name, target, cut)
            return
        self._coming.popleft()
        try:
            self._copy_pieces(target.view(-1), self._places[name].dtype)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ModelError(f"The tensor '{name}' cannot be copied to {target.device}: {error}.") from error

    def _copy_pieces(self, target: Tensor, stored_as: torch.dtype) -> None:
        done = 0
        while done < len(target):
            if self._buffer is None:
                run, read = self._ordered.popleft()
                self._buffer = read.result()
                self._pieces.extend(run)
            piece = self._pieces.popleft()
            numbers = self._buffer[piece.at : piece.at + piece.size].view(stored_as)
            self._copier.copy(numbers, target[done : done + len(numbers)])
            done += len(numbers)
            if not self._pieces:
                self._order_next(self._buffer, self._copier.mark())
                self._buffer = None

    def _order_next(self, buffer: Tensor | None = None, copied: Wait | None = None) -> None:
        """Have the next run read into a buffer once `copied` returns; None: into a new buffer."""
        if self._unordered:
            run = self._unordered.popleft()
            self._ordered.append((run, self._threads.submit(self._read, run, buffer, copied)))

    def _read(self, run: Run, buffer: Tensor | None, copied: Wait | None) -> Tensor:
        """Buffers are made by the threads: pinning takes long, and the first run need not wait for the last buffer."""
        try:
            if copied is not None:
                copied()
            if buffer is None:
                buffer = self._copier.buffer(self._setup.buffer_bytes)
            self._fill(buffer.numpy().data, run)
        except ModelError:
            raise
        except Exception as error:  # the border of a thread: whoever takes the run gets the error
            raise ModelError(f"The weights cannot be read into memory: {error}.") from error
        return buffer

    def _fill(self, buffer: memoryview, run: Run) -> None:
        for piece in run:
            at, end = piece.at, piece.at + piece.size
            while at < end:
                count = self._read_some(piece, buffer[at:end], piece.start + at - piece.at)
                if not count:
                    raise ModelError(
                        f"{piece.path} is truncated: while it was read, it ended in the middle of the tensor "
                        f"'{piece.name}'; download it again."
                    )
                at += count

    def _read_some(self, piece: RingPiece, target: memoryview, start: int) -> int:
        try:
            return self._setup.read(self._files[piece.path], [target], start)
        except OSError as error:
            raise _cannot_read(piece.path, error) from error


def _opened(path: Path, stack: ExitStack) -> int:
    try:
        return stack.enter_context(path.open("rb", buffering=0)).fileno()
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read ({error.strerror or error}).")
