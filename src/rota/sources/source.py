"""A source has two answers: what lies at a place, and its bytes; only one adapter's config and weights are fetched."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rota.core.errors import AdapterError, FaultCode

# ── source ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A source has two verbs: it lists the files of a place, and reads a stretch of one of them.


class SourceError(AdapterError):
    """A source could not give what was asked for. The message is a sentence for the client."""


class NothingError(SourceError):
    """There is no adapter at a place."""


class UnreachableError(SourceError):
    """A source does not answer: what it has is not known, and it may be back for the next call."""

    code = FaultCode.SOURCE_AWAY


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


# ── wanted ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# What is fetched of a place: the config and the weights of one adapter, and nothing else that lies there.

CONFIG = "adapter_config.json"
_WEIGHTS = re.compile(r"adapter_model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
MOST_CONFIG = 1 << 20


def wanted(files: Sequence[SourceFile], place: str, most_bytes: int) -> list[SourceFile]:
    """Sorted by name. Raises SourceError if this is no adapter, or one that is too large to be kept."""
    found = sorted((one for one in files if is_wanted(one.name)), key=lambda one: one.name)
    names = [one.name for one in found]
    if CONFIG not in names:
        raise NothingError(f"{place} is no adapter: it has no {CONFIG}. Give a place with what PEFT saved.")
    if len(names) == 1:
        raise SourceError(f"{place} has no adapter_model.safetensors; Rota reads only safetensors.")
    if any(one.size > MOST_CONFIG for one in found if one.name.endswith(".json")):
        raise SourceError(f"{place} has a config of more than {MOST_CONFIG >> 20} MiB.")
    if (size := sum(one.size for one in found)) > most_bytes:
        raise SourceError(f"{place} takes {_mib(size)}, more than the {_mib(most_bytes)} that the cache on disk holds.")
    return found


def is_wanted(name: str) -> bool:
    return name == CONFIG or _WEIGHTS.fullmatch(name) is not None


def digest_of(files: Sequence[SourceFile]) -> str:
    """One content has one digest."""
    told = "\n".join(f"{one.name} {one.size} {one.tag}" for one in sorted(files, key=lambda one: one.name))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
