"""A run is what one buffer holds: small tensors together, or a piece of a large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rota.engine.weights.reads.places import Place

# In bytes: a piece begins where numbers of any precision may begin, whatever its place in the file.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor's bytes in a buffer: [at, at + size) of it, which are [start, start + size) of the file."""

    name: str
    path: Path
    start: int
    size: int
    at: int


Run = tuple[Piece, ...]


def cut_into_runs(places: Mapping[str, Place], buffer_bytes: int) -> list[Run]:
    """The tensors in their order; only what does not fit into the rest of a buffer is cut."""
    assert buffer_bytes % ALIGNMENT == 0, "a cut would fall into a number"
    runs: list[list[Piece]] = []
    at = buffer_bytes
    for name, place in places.items():
        start = place.start
        while start < place.end:
            if at == buffer_bytes:
                runs.append([])
                at = 0
            size = min(place.end - start, buffer_bytes - at)
            runs[-1].append(Piece(name=name, path=place.path, start=start, size=size, at=at))
            start += size
            at += -(-size // ALIGNMENT) * ALIGNMENT
    return [tuple(run) for run in runs]
