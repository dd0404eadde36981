"""`wait` lets a busy resident keep its slot, unless an absent adapter has a request of higher priority.

Slots must not reverse priorities: a resident whose requests all have a lower priority drains at once. If the resident
has to leave before its answers are complete, another resident drains for it in turn, unless that resident has a higher
priority.
"""

from __future__ import annotations

from typing import Self

from rota.core.capacity import Capacity
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.policy.drains import DrainingPolicy, Views, outranking
from rota.policy.views import AdapterView, SlotsView


class Wait(DrainingPolicy):
    """However long an adapter waits, no resident drains for it: only priority or an interrupted answer makes one."""

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls()

    def blocked(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        interrupted = [view for one in sorted(self.interrupted) if (view := slots.absent.get(one))]
        return {view.adapter_id: view for view in (*interrupted, *outranking(slots, self.may_start(kept)))}

    def goes_before(self, absent: AdapterView, resident: AdapterView, now: float) -> bool:
        if absent.adapter_id in self.interrupted:
            return absent.priority >= resident.priority
        return absent.priority > resident.priority
