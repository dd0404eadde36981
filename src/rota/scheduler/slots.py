"""The slot ledger knows which adapter sits in which slot of the device, and whether its weights have arrived."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rota.core.ids import AdapterId, Slot
from rota.policy.eviction import Eviction


@dataclass(slots=True)
class Tenancy:
    """An adapter in a slot: LOADING until its copy was seen to be complete, READY from then on."""

    slot: Slot
    is_ready: bool = False
    has_run: bool = False


class SlotLedger:
    """State is derived, not remembered twice: no tenancy, loading, ready."""

    def __init__(self, slots: int, eviction: Eviction) -> None:
        self.total = slots
        self._empty = [Slot(slot) for slot in range(slots)]
        self._tenancies: dict[AdapterId, Tenancy] = {}
        self._eviction = eviction

    @property
    def empty(self) -> int:
        return len(self._empty)

    @property
    def tenancies(self) -> dict[AdapterId, Tenancy]:
        """By adapter, in the order they came. To be read, not written."""
        return self._tenancies

    def is_ready(self, adapter_id: AdapterId) -> bool:
        tenancy = self._tenancies.get(adapter_id)
        return tenancy is not None and tenancy.is_ready

    def begin_load(self, adapter_id: AdapterId) -> Slot:
        slot = heapq.heappop(self._empty)
        self._tenancies[adapter_id] = Tenancy(slot)
        self._eviction.use(adapter_id)
        return slot

    def finish_load(self, adapter_id: AdapterId) -> None:
        self._tenancies[adapter_id].is_ready = True

    def use(self, adapter_id: AdapterId) -> None:
        """An adapter is in this step."""
        self._tenancies[adapter_id].has_run = True
        self._eviction.use(adapter_id)

    def vacate(self, adapter_id: AdapterId) -> Slot:
        slot = self._tenancies.pop(adapter_id).slot
        heapq.heappush(self._empty, slot)
        self._eviction.forget(adapter_id)
        return slot

    def first_to_leave(self, candidates: list[AdapterId]) -> AdapterId:
        return self._eviction.choose(candidates)

    def check(self) -> None:
        taken = [tenancy.slot for tenancy in self._tenancies.values()]
        assert sorted([*taken, *self._empty]) == list(range(self.total)), "a slot is lost or shared"
