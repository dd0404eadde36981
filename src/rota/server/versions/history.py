"""The history of a name: its versions, when each came and went, and what each takes in host memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rota.core.events import AdapterAdded, AdapterRemoved, Event, HostChanged
from rota.core.ids import AdapterId
from rota.runtime.registry import Registry

# Versions of a name that are remembered after they left.
REMEMBERED = 16


@dataclass(slots=True)
class Record:
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
        self._present: dict[AdapterId, Record] = {}
        self._past: dict[str, deque[Record]] = {}

    def record_of(self, adapter_id: AdapterId) -> Record | None:
        return self._present.get(adapter_id)

    def past(self, name: str) -> list[Record]:
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
            self._present[adapter_id] = Record(adapter.name, adapter.version, time.time())

    def _removed(self, adapter_id: AdapterId) -> None:
        record = self._present.pop(adapter_id, None)
        if record is None:
            return
        if self._registry.loaded(record.name) is None:
            self._past.pop(record.name, None)
            return
        record.gone_at = time.time()
        self._past.setdefault(record.name, deque(maxlen=REMEMBERED)).append(record)
