"""The listing shows adapters with their versions, as a key may see them: when each came and went."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRemoved, Event, HostChanged
from rota.core.ids import AdapterId
from rota.runtime.registry import Registry
from rota.runtime.spool import Spool
from rota.server.access.disclosure import path_for
from rota.server.access.keys import Key
from rota.server.adapters.manager import AdapterManager

# Versions of a name that are remembered after they left.
REMEMBERED = 16


@dataclass(slots=True)
class VersionRecord:
    """One version, from the moment when it could be asked for. Times are in seconds since 1970."""

    version: int
    loaded_at: float
    bytes: int | None = None  # None: it was not read yet
    gone_at: float | None = None


@dataclass(frozen=True, slots=True)
class VersionBody:
    """One version: what it is, and what it takes in host memory once it was read."""

    version: int
    state: str  # current, staged, kept, leaving, lost
    # The folder for operators, the name for other keys; null for weights that came in a body.
    path: str | None
    bytes: int | None
    loaded_at: float | None


@dataclass(frozen=True, slots=True)
class AdapterBody:
    """A name, what it means, its versions that are there, and the last ones that left."""

    name: str
    version: int
    owner: str | None
    pinned: bool
    versions: list[VersionBody]
    history: list[VersionRecord]  # the newest first


@dataclass(frozen=True, slots=True)
class AdaptersListBody:
    """The adapters that a key may use."""

    object: str
    data: list[AdapterBody]


class Listing:
    """Hears of every event, to know when each version came and went; all else it reads from those who keep it."""

    def __init__(self, registry: Registry, adapters: AdapterManager, spool: Spool) -> None:
        self._registry = registry
        self._adapters = adapters
        self._spool = spool
        self._present: dict[AdapterId, tuple[str, VersionRecord]] = {}  # by its name
        self._past: dict[str, deque[VersionRecord]] = {}

    def all_for(self, key: Key) -> Iterator[AdapterBody]:
        """All adapters that a key may use, without the base model. One that is unloaded meanwhile is left out."""
        for adapter in self._registry.adapters:
            if key.may_use(adapter.name) and self._registry.loaded(adapter.name):
                yield self.one(key, adapter.name)

    def one(self, key: Key, name: str) -> AdapterBody:
        """A loaded name: its newest version first."""
        *others, current = self._registry.versions(name)
        versions = sorted([*others, current], key=lambda one: -one.version)
        return AdapterBody(
            name,
            current.version,
            current.owner if key.may_operate else None,
            current.is_pinned,
            [self._version(key, one) for one in versions],
            list(reversed(self._past.get(name, ()))),
        )

    def _version(self, key: Key, adapter: Adapter) -> VersionBody:
        _, record = self._present.get(adapter.adapter_id, ("", None))
        path = None if self._spool.has(adapter.adapter_id) else path_for(key, adapter)
        size, loaded_at = (record.bytes, record.loaded_at) if record else (None, None)
        return VersionBody(adapter.version, self._state(adapter), path, size, loaded_at)

    def _state(self, adapter: Adapter) -> str:
        if self._registry.is_lost(adapter):
            return "lost"
        if self._registry.has(adapter):
            return "current"
        return "leaving" if self._adapters.is_leaving(adapter) else "kept"

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AdapterAdded(adapter_id):
                    self._added(adapter_id)
                case HostChanged(adapter_id=adapter_id, size_bytes=size_bytes) if size_bytes:
                    self._added(adapter_id)
                    if adapter_id in self._present:
                        self._present[adapter_id][1].bytes = size_bytes
                case AdapterRemoved(adapter_id):
                    self._removed(adapter_id)

    def _added(self, adapter_id: AdapterId) -> None:
        adapter = self._registry.by_id(adapter_id)
        if adapter and adapter_id not in self._present:
            self._present[adapter_id] = adapter.name, VersionRecord(adapter.version, time.time())

    def _removed(self, adapter_id: AdapterId) -> None:
        name, record = self._present.pop(adapter_id, ("", None))
        if record is None:
            return
        if self._registry.loaded(name) is None:
            self._past.pop(name, None)
            return
        record.gone_at = time.time()
        self._past.setdefault(name, deque(maxlen=REMEMBERED)).append(record)
