"""`wait` lets a busy resident keep its slot, unless an absent adapter has a request of higher priority.

Slots must not reverse priorities: a resident whose requests all have a lower priority drains at once.
"""

from __future__ import annotations

from typing import Self

from rota.core.config import Capacity
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.policy.drains import DrainingPolicy, Views, outranking
from rota.policy.views import AdapterView, SlotsView


class Wait(DrainingPolicy):
    """Only the priority of an adapter makes a resident drain for it, however long the adapter waits."""

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls(capacity.slots)

    def blocked(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        return {view.adapter_id: view for view in outranking(slots)}

    def goes_before(self, absent: AdapterView, resident: AdapterView, now: float) -> bool:
        return absent.priority > resident.priority
