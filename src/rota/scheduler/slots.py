"""The slot ledger knows which adapter sits in which slot of the device, and whether its weights have arrived.

There is one place more than slots: the landing. The next adapter is copied there while the resident that it replaces
still runs. When the copy is complete the resident leaves, so no slot ever stands idle during a copy.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rota.core.config import LANDINGS
from rota.core.ids import AdapterId, Slot
from rota.policy.eviction import Eviction


@dataclass(slots=True, kw_only=True)
class Residency:
    """An adapter in a slot: it is loading until its copy is known to be complete, and ready from then on."""

    slot: Slot
    is_ready: bool = False
    has_run: bool = False
    replaces: AdapterId | None = None  # the resident that leaves when this adapter is ready


class SlotLedger:
    """An adapter's state follows from its residency: none, loading, or ready."""

    def __init__(self, slots: int, eviction: Eviction) -> None:
        self.total = slots
        self._empty = [Slot(slot) for slot in range(slots + LANDINGS)]
        self._residencies: dict[AdapterId, Residency] = {}
        self._replaced: set[AdapterId] = set()
        self._eviction = eviction

    @property
    def empty(self) -> int:
        """Slots without a resident, and without an adapter that is on its way to stay."""
        return self.total - (len(self._residencies) - len(self._replaced))

    @property
    def landings(self) -> int:
        """Places into which an adapter can be copied now."""
        return len(self._empty)

    @property
    def residencies(self) -> dict[AdapterId, Residency]:
        """By adapter, in the order of their arrival. For reading only."""
        return self._residencies

    def is_replaced(self, adapter_id: AdapterId) -> bool:
        """Is another adapter on its way that takes this adapter's slot?"""
        return adapter_id in self._replaced

    def begin_load(self, adapter_id: AdapterId, replaces: AdapterId | None = None) -> Slot:
        slot = heapq.heappop(self._empty)
        self._residencies[adapter_id] = Residency(slot=slot, replaces=replaces)
        if replaces is not None:
            self._replaced.add(replaces)
        self._eviction.use(adapter_id)
        return slot

    def finish_load(self, adapter_id: AdapterId) -> AdapterId | None:
        """The copy is complete; gives the adapter that it replaces: one of the two has to leave now."""
        residency = self._residencies[adapter_id]
        leaver, residency.replaces = residency.replaces, None
        if leaver is not None:
            self._replaced.remove(leaver)
        residency.is_ready = True
        return leaver

    def use(self, adapter_id: AdapterId) -> None:
        """An adapter is used in this step."""
        self._residencies[adapter_id].has_run = True
        self._eviction.use(adapter_id)

    def vacate(self, adapter_id: AdapterId) -> Slot:
        residency = self._residencies.pop(adapter_id)
        heapq.heappush(self._empty, residency.slot)
        self._eviction.forget(adapter_id)
        self._replaced.discard(adapter_id)
        if residency.replaces is not None:
            self._replaced.discard(residency.replaces)
        for other in self._residencies.values():
            if other.replaces == adapter_id:
                other.replaces = None
        return residency.slot

    def first_to_leave(self, candidates: list[AdapterId]) -> AdapterId:
        return self._eviction.choose(candidates)

    def check(self) -> None:
        taken = [residency.slot for residency in self._residencies.values()]
        assert sorted([*taken, *self._empty]) == list(range(self.total + LANDINGS)), "a slot is lost or shared"
        assert self.empty >= 0, "more adapters sit than there are slots"
        replaced = {residency.replaces for residency in self._residencies.values()} - {None}
        assert replaced == self._replaced
        assert replaced <= self._residencies.keys()
