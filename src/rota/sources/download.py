"""A download brings the files of a place into a folder. Where a connection broke off, the next one goes on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from rota.sources.source import ChangedError, Source, SourceError, SourceFile, UnreachableError

# ── contents ────────────────────────────────────────────────────────────────────────────────────────────────────────
# The contents of a folder in the cache: what it was made from, and each file's size and digest.

USED = ".used"


class Contents(msgspec.Struct, frozen=True):
    """As they were when the folder was made."""

    address: str = ""
    digest: str = ""
    owner: str = ""  # the key that it was brought for; empty: the server itself
    files: dict[str, tuple[int, str]] = {}

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())

    def are_in(self, folder: Path, deeply: bool) -> bool:
        """Whether a folder still has them. `deeply` reads every byte; else sizes are compared."""
        with suppress(OSError):
            return bool(self.files) and all(
                (folder / name).stat().st_size == size and not (deeply and sha256_of(folder / name) != digest)
                for name, (size, digest) in self.files.items()
            )
        return False


def contents_in(folder: Path) -> Contents:
    """Without files if the folder is gone or was damaged."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode((folder / USED).read_bytes(), type=Contents)
    return Contents()


def note_contents(folder: Path, contents: Contents) -> None:
    """Write down what lies in a folder. What a loss of power takes away again is found by its digest."""
    files = {path.name: (path.stat().st_size, sha256_of(path)) for path in folder.iterdir() if path.name != USED}
    (folder / USED).write_bytes(msgspec.json.encode(msgspec.structs.replace(contents, files=files)))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# A source that gives less than this is taken for one that has failed: 84 MB may take almost three minutes.
SLOWEST_BYTES_PER_S = 500_000
LEAST_S = 30.0
# Connections in a row that brought nothing.
MOST_VAIN = 3
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One place of a source, with the files that were listed there."""

    source: Source
    place: str
    files: Sequence[SourceFile]
    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    @property
    def size(self) -> int:
        return sum(one.size for one in self.files)

    @property
    def timeout_s(self) -> float:
        """The longest that it may take."""
        return LEAST_S + self.size / SLOWEST_BYTES_PER_S

    def into(self, folder: Path) -> None:
        """Raises SourceError."""
        ends_at = self.now() + self.timeout_s
        for file in self.files:
            self._fetch(file, folder / file.name, ends_at)
            _check(file, folder / file.name, self.place)

    def _fetch(self, file: SourceFile, target: Path, ends_at: float) -> None:
        vain = 0
        with target.open("ab") as out:
            while (start := out.tell()) < file.size:
                try:
                    self._append(file, out, ends_at)
                    broke_off: SourceError = UnreachableError(
                        f"{self.place}/{file.name} ended after {out.tell():,} of {file.size:,} bytes."
                    )
                except ChangedError:
                    raise
                except SourceError as error:
                    broke_off = error
                vain = 0 if out.tell() > start else vain + 1
                if out.tell() < file.size and (vain == MOST_VAIN or self.now() > ends_at):
                    raise broke_off
                if vain:
                    self.pause(PAUSE_S * vain)

    def _append(self, file: SourceFile, out: BinaryIO, ends_at: float) -> None:
        for piece in self.source.read(self.place, file, out.tell()):
            if self.now() > ends_at:
                rate = f"{SLOWEST_BYTES_PER_S / 1e6:g} MB/s"
                raise UnreachableError(f"{self.place} gives its files too slowly: less than {rate}.")
            if out.tell() + len(piece) > file.size:
                raise ChangedError(f"{self.place}/{file.name} is longer than its source says: {file.size:,} bytes.")
            out.write(piece)


def _check(file: SourceFile, target: Path, place: str) -> None:
    if target.stat().st_size != file.size:
        raise ChangedError(f"{place}/{file.name} is longer than its source says: {file.size:,} bytes.")
    if file.sha256 and sha256_of(target) != file.sha256:
        raise ChangedError(f"{place}/{file.name} is not what its source says: its SHA-256 is another.")
