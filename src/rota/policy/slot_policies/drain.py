"""`drain` makes room for an adapter that has waited too long: the resident that needs the fewest steps drains for it.

An adapter with a request of higher priority than all requests of a resident need not wait that long.
"""

from __future__ import annotations

import math
from typing import Self

from rota.core.capacity import Capacity
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.policy.drains import LOOK_AHEAD, DrainingPolicy, Views, outranking
from rota.policy.views import AdapterView, SlotsView, lacks_only_a_slot


class Drain(DrainingPolicy):
    """`max_wait_s` is how long an adapter may wait before another drains for it."""

    def __init__(self, max_wait_s: float) -> None:
        super().__init__()
        self._max_wait_s = max_wait_s
        self._next_starves_at = math.inf

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls(config.lora_drain_wait_threshold)

    def blocked(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        return self._starving(slots, kept, now) | {
            view.adapter_id: view for view in outranking(slots, self.may_start(kept))
        }

    def goes_before(self, absent: AdapterView, resident: AdapterView, now: float) -> bool:
        return self._starves(absent, now) or absent.priority > resident.priority

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        """When a reservation lapses, or the next adapter starves."""
        return min(super().ask_again_at(slots, now), self._next_starves_at)

    def _starves(self, view: AdapterView, now: float) -> bool:
        """Has the adapter waited strictly longer than it may, for a first token or with parked sequences?"""
        return now > self.due_at(view) + self._max_wait_s

    def _starving(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        """The longest waits first, as many as may get a drain beside the adapters that have one."""
        starving: dict[AdapterId, AdapterView] = {}
        lacking, self._next_starves_at = 0, math.inf
        for view in slots.absent:
            if not self._starves(view, now):
                self._next_starves_at = math.nextafter(self.due_at(view) + self._max_wait_s, math.inf)
                break
            if len(starving.keys() - kept.keys()) == self.most_drains or lacking == LOOK_AHEAD:
                break
            if lacks_only_a_slot(slots, view):
                starving[view.adapter_id] = view
            else:
                lacking += 1
        return starving
