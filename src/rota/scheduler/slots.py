"""The slot ledger knows which adapter sits in which slot of the device, and whether its weights have arrived.

A slot is a place on the device, and there is no other place: an adapter that comes is copied to where another adapter
leaves, while the rest run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rota.core.ids import AdapterId, Slot
from rota.policy.eviction import Eviction


@dataclass(slots=True, kw_only=True)
class Residency:
    """An adapter in a slot: it is loading until its copy is known to be complete, and ready from then on."""

    slot: Slot
    is_ready: bool = False
    has_run: bool = False


class SlotLedger:
    """An adapter's state follows from its residency: none, loading, or ready."""

    def __init__(self, slots: int, eviction: Eviction) -> None:
        self.total = slots
        self._empty = [Slot(slot) for slot in range(slots)]
        self._residencies: dict[AdapterId, Residency] = {}
        self._eviction = eviction

    @property
    def empty(self) -> int:
        """Slots without a resident, and without an adapter that is on its way."""
        return len(self._empty)

    @property
    def on_their_way(self) -> list[AdapterId]:
        """Adapters whose copies are not known to be complete, in the order of the copies."""
        return [adapter_id for adapter_id, residency in self._residencies.items() if not residency.is_ready]

    @property
    def residencies(self) -> dict[AdapterId, Residency]:
        """By adapter, in the order of their arrival. For reading only."""
        return self._residencies

    def begin_load(self, adapter_id: AdapterId) -> Slot:
        slot = heapq.heappop(self._empty)
        self._residencies[adapter_id] = Residency(slot=slot)
        self._eviction.use(adapter_id)
        return slot

    def finish_load(self, adapter_id: AdapterId) -> None:
        """The adapter's sequences may be in the next step."""
        self._residencies[adapter_id].is_ready = True

    def use(self, adapter_id: AdapterId) -> None:
        """An adapter is used in this step."""
        self._residencies[adapter_id].has_run = True
        self._eviction.use(adapter_id)

    def vacate(self, adapter_id: AdapterId) -> Slot:
        residency = self._residencies.pop(adapter_id)
        heapq.heappush(self._empty, residency.slot)
        self._eviction.forget(adapter_id)
        return residency.slot

    def first_to_leave(self, candidates: list[AdapterId]) -> AdapterId:
        return self._eviction.choose(candidates)

    def check(self) -> None:
        taken = [residency.slot for residency in self._residencies.values()]
        assert sorted([*taken, *self._empty]) == list(range(self.total)), "a slot is lost or shared"
