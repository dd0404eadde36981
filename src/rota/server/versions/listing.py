"""The listing shows adapters with their versions, as a key may see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rota.core.adapter import Adapter
from rota.runtime.registry import Registry
from rota.runtime.spool import Spool
from rota.server.access.disclosure import path_for
from rota.server.access.keys import Key
from rota.server.adapters import AdapterManager
from rota.server.versions.history import History, Record


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


def _past(record: Record) -> dict[str, Any]:
    return {
        "version": record.version,
        "bytes": record.size_bytes or None,
        "loaded_at": record.loaded_at,
        "gone_at": record.gone_at,
    }
