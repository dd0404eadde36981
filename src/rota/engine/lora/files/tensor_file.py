"""A TensorFile is one safetensors file: its header is read at once, and its tensors are read when asked for.

A memory map would kill the process if the file became shorter during a read, and users replace adapters while a server
runs. Reads fill torch's memory without the interpreter's lock, so steps go on meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.errors import AdapterError
from rota.engine.lora.files.outline import LONGEST_HEADER, TensorEntry
from rota.engine.parallel.shard import Cut

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Linux reads into no more places in one call.
MOST_PLACES = 1024

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in the header; its bytes are [start, end) of the file."""

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self, cut: Cut | None = None) -> Tensor:
        """A new tensor, of all numbers or of a stretch of them; blocks on the disk."""
        return self.file.read(self, cut)


class TensorFile:
    """An open file; the caller closes it. Several threads may read."""

    def __init__(self, descriptor: int, path: Path) -> None:
        """The descriptor is the file's from now on. It lies at `path`, or did so when it was opened."""
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}  # by name, once the header was understood
        self._digests: dict[tuple[int, ...], bytes] = {}  # by the stretch that was read
        self._file: BinaryIO = os.fdopen(descriptor, "rb")
        try:
            self._written_at = self._state()
            self.size = self._written_at[0]
            self.header = self._read_header()  # as it stands in the file
        except (AdapterError, OSError):
            self.close()
            raise

    def describe(self, entries: Iterable[TensorEntry]) -> Iterable[StoredTensor]:
        """The tensors that the header has, once it was understood. Raises AdapterError if one is not in the file."""
        self.tensors = {entry.name: self._stored(entry) for entry in entries}
        in_order = sorted(self.tensors.values(), key=lambda stored: (stored.start, stored.end))
        for one, other in pairwise(in_order):
            if one.end > other.start:
                raise self._corrupt(f"the tensors '{one.name}' and '{other.name}' share bytes")
        return self.tensors.values()

    @property
    def data_start(self) -> int:
        """Where the header ends."""
        return 8 + len(self.header)

    @property
    def digest(self) -> bytes:
        """Of all numbers that were read, by whichever threads and in whatever order.

        Raises AdapterError if the file was written to since it was opened: half of them may be old.
        """
        if self._state() != self._written_at:
            raise AdapterError(f"{self.path} was written to while it was read; load it again when it is whole.")
        whole = hashlib.sha256()
        for place in sorted(self._digests):
            whole.update(repr(place).encode() + self._digests[place])
        return whole.digest()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _digest(self, content: Bytes, *place: int) -> None:
        """SHA-256, which processors compute by themselves: it takes a third of the time of the others here."""
        self._digests[*place, content.nbytes] = hashlib.sha256(content.reshape(-1).data).digest()

    def close(self) -> None:
        self._file.close()

    def read(self, stored: StoredTensor, cut: Cut | None = None) -> Tensor:
        """Reads no more than the stretch: rows at once, columns row by row."""
        shape, place = list(stored.shape), () if cut is None else (cut.axis, cut.first, cut.end)
        if cut is not None:
            shape[cut.axis] = cut.end - cut.first
        tensor = torch.empty(shape, dtype=stored.dtype)
        if cut is None or cut.axis == 0:
            self._fill(stored, tensor, 0 if cut is None else cut.first * stored.shape[1])
        else:
            for row, line in enumerate(tensor):
                self._fill(stored, line, row * stored.shape[1] + cut.first)
        self._digest(tensor.view(-1).view(torch.uint8).numpy(), stored.start, *place)
        return tensor

    def _fill(self, stored: StoredTensor, target: Tensor, first: int) -> None:
        """Read the numbers of a stored tensor from `first` on."""
        raw = target.view(-1).view(torch.uint8).numpy()
        self._read(stored.start + first * stored.dtype.itemsize, [raw])

    def read_into(self, start: int, targets: Sequence[Bytes]) -> None:
        """The bytes of the file from `start` on, in one call or few; blocks on the disk."""
        self._read(start, targets)
        for target in targets:
            self._digest(target, start)
            start += target.nbytes

    def _read(self, start: int, targets: Sequence[Bytes]) -> None:
        left = [target for target in targets if target.nbytes]
        while left:
            try:
                count = os.preadv(self._file.fileno(), [target.data for target in left[:MOST_PLACES]], start)
            except OSError as error:
                raise AdapterError(f"{self.path} cannot be read ({error.strerror}).") from error
            if not count:
                raise self._corrupt(f"it ends in the middle of the tensor '{self._name_at(start)}'")
            start, left = start + count, _behind(left, count)

    def _name_at(self, place: int) -> str:
        return next((name for name, stored in self.tensors.items() if stored.start <= place < stored.end), "")

    def _read_header(self) -> bytes:
        length = int.from_bytes(self._file.read(8), "little")
        if self.size < 8 or 8 + length > self.size:
            raise self._corrupt(f"it has {self.size} bytes and no whole header")
        if length > LONGEST_HEADER:
            raise AdapterError(f"{self.path} has a header of {length:,} bytes; Rota reads {LONGEST_HEADER:,} at most.")
        header = self._file.read(length)
        if len(header) < length:
            raise self._corrupt(f"it has {self.size} bytes and no whole header")
        return header

    def _stored(self, entry: TensorEntry) -> StoredTensor:
        if entry.dtype not in DTYPES:
            raise AdapterError(
                f"{self.path}: the tensor '{entry.name}' is stored as {entry.dtype}; Rota reads {', '.join(DTYPES)}."
            )
        dtype, start, end = DTYPES[entry.dtype], self.data_start + entry.start, self.data_start + entry.end
        if end - start != math.prod(entry.shape) * dtype.itemsize:
            raise self._corrupt(
                f"the tensor '{entry.name}' has bytes [{entry.start}, {entry.end}), which are not its shape "
                f"{entry.shape}"
            )
        if end > self.size:
            raise self._corrupt(f"it ends at byte {self.size}, the tensor '{entry.name}' at {end}")
        return StoredTensor(self, entry.name, dtype, entry.shape, start, end)

    def _corrupt(self, why: str) -> AdapterError:
        return AdapterError(f"{self.path} is truncated or corrupt: {why}; copy the file again.")


def _behind(targets: Sequence[Bytes], count: int) -> list[Bytes]:
    """What is left of targets after so many bytes."""
    left = list[Bytes]()
    for target in targets:
        done = min(count, target.nbytes)
        count -= done
        if done < target.nbytes:
            left.append(target.reshape(-1)[done:])
    return left
