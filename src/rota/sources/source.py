"""A source has two verbs: it lists the files of a place, and reads a stretch of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.core.errors import AdapterError


class SourceError(AdapterError):
    """A source could not give what was asked for. The message is a sentence for the client."""


class NothingError(SourceError):
    """There is no adapter at a place."""


class UnreachableError(SourceError):
    """A source does not answer: what it has is not known."""


class ChangedError(SourceError):
    """A file is another one than when it was listed: what was read of it so far is worth nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file as its source lists it."""

    name: str  # below its place
    size: int
    tag: str  # another one as soon as the content is
    sha256: str = ""  # of the content, if the source knows it
    revision: str = ""  # which of the place's states it was listed in, for a source that keeps them all


def refuse_size(where: str, file: SourceFile, size: int) -> None:
    """Raises ChangedError if a file that is being read has another size than was listed."""
    if size != file.size:
        raise ChangedError(f"{where}/{file.name} has {size:,} bytes; its source listed {file.size:,}.")


class Source(Protocol):
    """For any thread; blocks, but never longer than its time-outs."""

    def files(self, place: str) -> Sequence[SourceFile]:
        """What lies at a place, without what lies in folders below it. Raises SourceError."""
        ...

    def read(self, place: str, file: SourceFile, start: int, end: int | None = None) -> Iterator[bytes]:
        """The bytes [start, end) of a file. Raises ChangedError if its tag is another by now, else SourceError."""
        ...
