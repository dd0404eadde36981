"""A ring of buffers: threads read runs ahead into free buffers, and one thread takes them in their order."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.parallel.shard import Cut

# ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A place says where a tensor's bytes lie in a safetensors file.

# In safetensors' words: what the model's plain tensors may be stored as.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """The bytes [start, end) of a file, and what numbers they are."""

    path: Path
    start: int
    end: int
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return (self.end - self.start) // self.dtype.itemsize

    def rows(self, cut: Cut) -> FileRange:
        """Where some of the tensor's rows lie."""
        row_bytes = (self.end - self.start) // cut.of
        return replace(self, start=self.start + cut.first * row_bytes, end=self.start + cut.end * row_bytes)


def read_places(path: Path) -> dict[str, FileRange]:
    """By name, from the header of a file that the library has checked; tensors of other kinds are left out."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    places = {}
    for name, entry in header.items():
        if entry.get("dtype") in DTYPES:
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            places[name] = FileRange(path=path, start=start, end=end, dtype=DTYPES[entry["dtype"]])
    return places


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


# ── copier ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A copier owns the buffers that files are read into, and copies from them to the device.

# Returns when the copies that it was made behind are complete.
Wait = Callable[[], None]


class Copier(Protocol):
    """The end of the `with` block gives all buffers back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def buffer(self, size: int) -> Tensor:
        """[size] uint8 in host memory; from any thread."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy a part of a buffer into a tensor of as many numbers, in the target's precision."""
        ...

    def mark(self) -> Wait:
        """What waits, in any thread, for all copies that were started so far."""
        ...


# Reads into the buffers from a place in a file on, as `os.preadv` does; without Python's lock.
Read = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSetup:
    """How many threads read, into how many buffers, and by what; the numbers are guesses (decision 0020)."""

    threads: int = 8
    buffers: int = 16
    buffer_bytes: int = 32 << 20
    read: Read = os.preadv


USUAL_SETUP = RingSetup()


@dataclass(frozen=True, slots=True)
class _Free:
    """A buffer that may be read into once its last copy is complete; None: it is still to be made."""

    buffer: Tensor | None = None
    copied: Wait | None = None


class Ring:
    """Works within its `with` block, whose end ends all threads. An error in any of them is raised by `take`.

    A thread gets the next run together with a buffer for it. So the oldest run that is not taken always has a buffer,
    and no order of reads and copies can stop the ring.
    """

    def __init__(self, runs: Sequence[Run], copier: Copier, setup: RingSetup) -> None:
        self._runs = runs
        self._copier = copier
        self._setup = setup
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()
        self._changed = threading.Condition()
        # Below: only under the condition's lock.
        self._free = deque(_Free() for _ in range(setup.buffers))
        self._full: dict[int, Tensor] = {}  # by number of run
        self._begun = self._taken = 0
        self._error: ModelError | None = None
        self._is_closed = False
        # Daemons: a disk that never answers must not hold up the end of the process.
        self._threads = [
            threading.Thread(target=self._read_runs, name=f"rota-weights-{number}", daemon=True)
            for number in range(min(setup.threads, len(runs)))
        ]

    def __enter__(self) -> Self:
        with self._stack:
            for path in {piece.path for run in self._runs for piece in run}:
                self._files[path] = self._open(path)
            self._stack = self._stack.pop_all()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._free.clear()
        self._full.clear()
        self._stack.close()

    def take(self) -> tuple[Run, Tensor]:
        """The next run and the buffer that holds it; waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._taken in self._full)
            if self._error is not None:
                raise self._error
            number, self._taken = self._taken, self._taken + 1
            return self._runs[number], self._full.pop(number)

    def give_back(self, buffer: Tensor, copied: Wait) -> None:
        """A buffer may be used again once `copied` returns."""
        with self._changed:
            self._free.append(_Free(buffer, copied))
            self._changed.notify_all()

    def _open(self, path: Path) -> int:
        try:
            return self._stack.enter_context(path.open("rb", buffering=0)).fileno()
        except OSError as error:
            raise _cannot_read(path, error) from error

    def _read_runs(self) -> None:
        try:
            while (begun := self._begin()) is not None:
                number, free = begun
                buffer = self._ready(free)
                self._fill(buffer.numpy().data, self._runs[number])
                with self._changed:
                    self._full[number] = buffer
                    self._changed.notify_all()
        except ModelError as error:
            self._fail(error)
        except Exception as error:  # the border of a thread: `take` raises the error
            self._fail(ModelError(f"The weights cannot be read into memory: {error}."))

    def _fail(self, error: ModelError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _begin(self) -> tuple[int, _Free] | None:
        """The next run to read and a buffer for it; None if there is no more to read."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or bool(self._free))
            if self._is_over():
                return None
            number, self._begun = self._begun, self._begun + 1
            return number, self._free.popleft()

    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None or self._begun == len(self._runs)

    def _ready(self, free: _Free) -> Tensor:
        """Buffers are made by the threads: pinning takes long, and the first run need not wait for the last buffer."""
        if free.copied is not None:
            free.copied()
        return self._copier.buffer(self._setup.buffer_bytes) if free.buffer is None else free.buffer

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


def _cannot_read(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read ({error.strerror or error}).")
