"""The listing shows adapters with their versions, as a key may see them: when each came and went."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rota.core.adapter import Adapter
from rota.core.events import AdapterAdded, AdapterRemoved, Event, HostChanged
from rota.core.ids import AdapterId
from rota.runtime.registry import Registry
from rota.runtime.spool import Spool
from rota.server.access.disclosure import path_for
from rota.server.access.keys import Key
from rota.server.adapters.manager import AdapterManager

# ── history ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The history of a name: its versions, when each came and went, and what each takes in host memory.

# Versions of a name that are remembered after they left.
REMEMBERED = 16


@dataclass(slots=True)
class VersionRecord:
    """One version, from the moment when it could be asked for. Times are in seconds since 1970."""

    name: str
    version: int
    loaded_at: float
    size_bytes: int = 0  # 0: it was not read yet
    gone_at: float | None = None


class History:
    """Hears of every event."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._present: dict[AdapterId, VersionRecord] = {}
        self._past: dict[str, deque[VersionRecord]] = {}

    def record_of(self, adapter_id: AdapterId) -> VersionRecord | None:
        return self._present.get(adapter_id)

    def past(self, name: str) -> list[VersionRecord]:
        """The last versions that left, the newest first."""
        return list(reversed(self._past.get(name, ())))

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AdapterAdded(adapter_id):
                    self._added(adapter_id)
                case HostChanged(adapter_id=adapter_id, size_bytes=size_bytes) if size_bytes:
                    self._added(adapter_id)
                    if record := self._present.get(adapter_id):
                        record.size_bytes = size_bytes
                case AdapterRemoved(adapter_id):
                    self._removed(adapter_id)

    def _added(self, adapter_id: AdapterId) -> None:
        adapter = self._registry.by_id(adapter_id)
        if adapter and adapter_id not in self._present:
            self._present[adapter_id] = VersionRecord(adapter.name, adapter.version, time.time())

    def _removed(self, adapter_id: AdapterId) -> None:
        record = self._present.pop(adapter_id, None)
        if record is None:
            return
        if self._registry.loaded(record.name) is None:
            self._past.pop(record.name, None)
            return
        record.gone_at = time.time()
        self._past.setdefault(record.name, deque(maxlen=REMEMBERED)).append(record)


# ── listing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The listing shows adapters with their versions, as a key may see them.


class Listing:
    """Reads what others keep."""

    def __init__(self, registry: Registry, adapters: AdapterManager, history: History, spool: Spool) -> None:
        self._registry = registry
        self._adapters = adapters
        self._history = history
        self._spool = spool

    def all_for(self, key: Key) -> Iterator[dict[str, Any]]:
        """All adapters that a key may use, without the base model. One that is unloaded meanwhile is left out."""
        for adapter in self._adapters.loaded:
            if key.may_use(adapter.name) and adapter.name in self:
                yield self.one(key, adapter.name)

    def __contains__(self, name: str) -> bool:
        return self._registry.loaded(name) is not None

    def one(self, key: Key, name: str) -> dict[str, Any]:
        """A loaded name: its newest version first."""
        *others, current = self._registry.versions(name)
        versions = sorted([*others, current], key=lambda one: -one.version)
        return {
            "name": name,
            "version": current.version,
            "owner": current.owner if key.may_operate else None,
            "pinned": current.is_pinned,
            "versions": [self._version(key, one) for one in versions],
            "history": [_past(record) for record in self._history.past(name)],
        }

    def _version(self, key: Key, adapter: Adapter) -> dict[str, Any]:
        record = self._history.record_of(adapter.adapter_id)
        return {
            "version": adapter.version,
            "state": self._state(adapter),
            "path": None if self._spool.has(adapter.adapter_id) else path_for(key, adapter),
            "bytes": (record.size_bytes or None) if record else None,
            "loaded_at": record.loaded_at if record else None,
        }

    def _state(self, adapter: Adapter) -> str:
        if self._registry.is_lost(adapter):
            return "lost"
        if self._registry.has(adapter):
            return "current"
        return "leaving" if self._adapters.is_leaving(adapter) else "kept"


def _past(record: VersionRecord) -> dict[str, Any]:
    return {
        "version": record.version,
        "bytes": record.size_bytes or None,
        "loaded_at": record.loaded_at,
        "gone_at": record.gone_at,
    }
