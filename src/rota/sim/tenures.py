"""Tenures say which adapter held which place on the device, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rota.core.events import Event, SlotChanged, SlotState
from rota.core.ids import AdapterId, EngineId, RequestId, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTenure:
    """An adapter in one place during [since, until): being copied there, or ready to run."""

    engine_id: EngineId
    place: Slot
    adapter_id: AdapterId
    since: float
    until: float
    is_ready: bool


@dataclass(slots=True)
class Tenures:
    """Follows the changes of slots; `closed` has the tenures that are over."""

    closed: list[SimulatedTenure] = field(default_factory=list)
    last_at: float = 0.0
    _open: dict[tuple[EngineId, Slot], SlotChanged] = field(default_factory=dict)

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        """A request that only waits holds no slot."""

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            self.last_at = event.at
            if isinstance(event, SlotChanged):
                self._change(event)

    def close(self) -> None:
        """The run is over: every adapter that is in a place was there until the end."""
        for begun in list(self._open.values()):
            self._end(begun, self.last_at)

    def _change(self, event: SlotChanged) -> None:
        self._end(event, event.at)
        if event.state is not SlotState.EMPTY:
            self._open[event.engine_id, event.slot] = event

    def _end(self, change: SlotChanged, at: float) -> None:
        """The tenure in the slot that changes is over."""
        begun = self._open.pop((change.engine_id, change.slot), None)
        if begun and at > begun.at:
            is_ready = begun.state is SlotState.READY
            self.closed.append(
                SimulatedTenure(
                    engine_id=begun.engine_id,
                    place=begun.slot,
                    adapter_id=begun.adapter_id,
                    since=begun.at,
                    until=at,
                    is_ready=is_ready,
                )
            )
