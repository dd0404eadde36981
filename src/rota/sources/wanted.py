"""What is fetched of a place: the config and the weights of one adapter, and nothing else that lies there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from rota.sources.source import NothingError, SourceError, SourceFile

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
