"""An outline of an adapter is a folder with its config and the headers of its weights, read without the weights.

The files are as long as the source says, so what checks a header against a size needs to know no outlines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rota.sources.source import ChangedError, Source, SourceFile

# Holds the header of a rank-16 adapter of an 8B model, which has 448 tensors, in one read.
FIRST_BYTES = 128 << 10
# A header beyond this is no adapter's: it would have a hundred thousand tensors.
MOST_BYTES = 16 << 20


@contextmanager
def outlined(source: Source, place: str, files: Sequence[SourceFile]) -> Iterator[Path]:
    """A folder that is gone after the block. Raises SourceError."""
    with tempfile.TemporaryDirectory(prefix="rota-outline-") as name:
        folder = Path(name).resolve()
        for file in files:
            with (folder / file.name).open("wb") as out:
                out.write(_start_of(source, place, file))
                out.truncate(file.size)
        yield folder


def _start_of(source: Source, place: str, file: SourceFile) -> bytes:
    if not file.name.endswith(".safetensors"):
        return _read(source, place, file, 0, file.size)
    first = _read(source, place, file, 0, min(FIRST_BYTES, file.size))
    end = 8 + int.from_bytes(first[:8], "little")
    if end <= len(first) or end > min(file.size, MOST_BYTES):  # in the second case what follows would be no header
        return first
    return first + _read(source, place, file, len(first), end)


def _read(source: Source, place: str, file: SourceFile, start: int, end: int) -> bytes:
    if start == end:
        return b""
    content = b"".join(source.read(place, file, start, end))
    if len(content) != end - start:
        raise ChangedError(f"{place}/{file.name} is not as long as its source says: {file.size:,} bytes.")
    return content
