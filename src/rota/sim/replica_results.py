"""Replica results are what one replica of several did: its requests as their clients saw them, its loads and reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rota.core.events import Event, HostChanged, HostState, SlotChanged, SlotState
from rota.observe.summary import Recorder


@dataclass(slots=True, kw_only=True)
class ReplicaResults:
    """Follows the events of one replica; reads before `since` are those that adapters were added with."""

    since: float
    recorder: Recorder = field(default_factory=Recorder)
    loads: int = 0  # copies into slots
    reads: int = 0  # from disk into host memory

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            kind = type(event)
            if kind is SlotChanged:
                self.loads += event.state is SlotState.LOADING  # type: ignore[union-attr]
            elif kind is HostChanged:
                self.reads += event.state is HostState.READING and event.at >= self.since  # type: ignore[union-attr]
        self.recorder.observe(events)

    def summary(self) -> dict[str, Any]:
        found = self.recorder.summary()
        del found["adapters"]  # a request's adapter is in the summary of all replicas
        return {**found, "loads": self.loads, "reads": self.reads}
