"""A place says where a tensor's bytes lie in a safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rota.engine.parallel.shard import Cut

# In safetensors' words: what the model's plain tensors may be stored as.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The bytes [start, end) of a file, and what numbers they are."""

    path: Path
    start: int
    end: int
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        return (self.end - self.start) // self.dtype.itemsize

    def rows(self, cut: Cut) -> Place:
        """Where some of the tensor's rows lie."""
        row_bytes = (self.end - self.start) // cut.of
        return replace(self, start=self.start + cut.first * row_bytes, end=self.start + cut.end * row_bytes)


def read_places(path: Path) -> dict[str, Place]:
    """By name, from the header of a file that the library has checked; tensors of other kinds are left out."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    places = {}
    for name, entry in header.items():
        if entry.get("dtype") in DTYPES:
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            places[name] = Place(path=path, start=start, end=end, dtype=DTYPES[entry["dtype"]])
    return places
