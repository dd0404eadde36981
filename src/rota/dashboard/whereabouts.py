"""Where an adapter lies that is in no slot: in host memory, on its way there, on disk, or at its source."""

from __future__ import annotations

from rota.core.adapter import Adapter
from rota.core.events import AdapterRemoved, HostChanged, HostState
from rota.core.ids import AdapterId, EngineId


class Whereabouts:
    """Follows reads and drops of every engine. An adapter that was never read takes no memory."""

    def __init__(self) -> None:
        self._states: dict[AdapterId, dict[EngineId, HostState]] = {}

    def hear(self, event: HostChanged | AdapterRemoved) -> None:
        if isinstance(event, AdapterRemoved):
            self._states.pop(event.adapter_id, None)
        else:
            self._states.setdefault(event.adapter_id, {})[event.engine_id] = event.state

    def clear(self, engine: EngineId) -> None:
        """An engine is down, and its memory with it."""
        for states in self._states.values():
            if engine in states:
                states[engine] = HostState.GONE

    def of(self, adapter: Adapter) -> str:
        """`host`, `reading`, `disk` or `source`: the nearest, over all engines."""
        states = self._states.get(adapter.adapter_id, {}).values()
        if HostState.HELD in states:
            return "host"
        if HostState.READING in states:
            return "reading"
        # What was read from afar once was kept on disk.
        return "disk" if states or not adapter.is_far else "source"
