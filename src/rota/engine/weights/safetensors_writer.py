"""A safetensors file is written tensor by tensor: the library's own writer needs all tensors in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt


class Entry(NamedTuple):
    """A tensor in the header."""

    name: str
    dtype: str  # in safetensors' words: BF16, U8, …
    shape: tuple[int, ...]
    itemsize: int


def write_safetensors(path: Path, entries: Sequence[Entry], arrays: Iterable[npt.NDArray[Any]]) -> None:
    """Write the arrays in the order of their entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.itemsize * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())
