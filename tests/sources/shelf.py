"""A shelf is a source in memory, whose connections break off where a test says so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rota.sources.source import ChangedError, SourceError, SourceFile

PIECE = 10


def adapter_files(word: str = "one") -> dict[str, bytes]:
    return {"adapter_config.json": json.dumps({"r": 8}).encode(), "adapter_model.safetensors": word.encode() * 20}


@dataclass
class Shelf:
    """Places and their files. `breaks` are the bytes after which one connection after the other breaks off."""

    places: dict[str, dict[str, bytes]]
    breaks: list[int] = field(default_factory=list)
    reads: list[tuple[str, int]] = field(default_factory=list)
    tells_digests: bool = False

    def files(self, place: str) -> Sequence[SourceFile]:
        if place not in self.places:
            raise SourceError(f"There is nothing at {place}.")
        return [self._listed(name, content) for name, content in self.places[place].items()]

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        self.reads.append((file.name, start))
        content = self.places[place][file.name][:end]
        if _tag(self.places[place][file.name]) != file.tag:
            raise ChangedError(f"{place}/{file.name} changed.")
        ends_at = start + self.breaks.pop(0) if self.breaks else len(content)
        for first in range(start, min(ends_at, len(content)), PIECE):
            yield content[first : min(first + PIECE, ends_at)]
        if ends_at < len(content):
            raise SourceError("The connection broke off.")

    def _listed(self, name: str, content: bytes) -> SourceFile:
        sha256 = hashlib.sha256(content).hexdigest() if self.tells_digests else ""
        return SourceFile(name=name, size=len(content), tag=_tag(content), sha256=sha256)


def _tag(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()
