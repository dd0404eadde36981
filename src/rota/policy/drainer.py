"""The drainer makes room for an adapter that waits too long, by letting another one finish and admit little.

A drain has a deadline that is fixed when it starts: 1.2 × the steps its longest sequence still needed then. What it admits
meanwhile must fit into the steps that are left, so a drain always ends, and the slot it frees is kept for whom it
was started. The base model needs no slot and is never seen here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.core.ids import AdapterId
from rota.policy.views import AdapterView

TOLERANCE = 1.2
RESERVATION_S = 1.0


@dataclass(slots=True)
class Drain:
    """A victim on its way out, for somebody who starves."""

    beneficiary: AdapterId
    last_step: int  # the victim's step count at which it should be empty


@dataclass(slots=True)
class DrainCounts:
    """For metrics: how drains began and ended."""

    started: int = 0
    finished: int = 0
    called_off: int = 0
    expired: int = 0


@dataclass(slots=True)
class LoRADrainer:
    """Watches waits once a pass; `max_wait_s` is what an adapter may wait before another drains for it."""

    max_wait_s: float
    slots: int
    counts: DrainCounts = field(default_factory=DrainCounts)
    _drains: dict[AdapterId, Drain] = field(default_factory=dict)
    _reserved_until: dict[AdapterId, float] = field(default_factory=dict)

    @property
    def draining_for(self) -> dict[AdapterId, AdapterId]:
        """Victim → beneficiary."""
        return {victim: drain.beneficiary for victim, drain in self._drains.items()}

    def reserved(self, now: float) -> frozenset[AdapterId]:
        """Adapters for which a freed slot is being kept."""
        return frozenset(adapter_id for adapter_id, until in self._reserved_until.items() if now < until)

    @property
    def reserved_until(self) -> float:
        """When the first reservation lapses; infinity if there is none."""
        return min(self._reserved_until.values(), default=math.inf)

    def starving_at(self, view: AdapterView) -> float:
        """The moment after which a waiting adapter counts as starving."""
        return view.oldest_at + self.max_wait_s

    def observe(
        self,
        blocked: Mapping[AdapterId, AdapterView],
        residents: Mapping[AdapterId, AdapterView],
        free_slots: int,
        now: float,
    ) -> None:
        """Once a pass: `blocked` wait for a slot and for nothing else, `residents` sit in one."""
        self._end_drains(blocked, residents, now)
        if free_slots > 0:
            return
        served = {drain.beneficiary for drain in self._drains.values()} | self._reserved_until.keys()
        starving = sorted(
            (view for view in blocked.values() if now > self.starving_at(view) and view.adapter_id not in served),
            key=lambda view: (view.oldest_at, view.adapter_id),
        )
        for view in starving:
            if len(self._drains) >= math.ceil(self.slots / 2):
                return
            victims = [
                resident
                for adapter_id, resident in residents.items()
                if adapter_id not in self._drains and not resident.is_pinned and resident.running
            ]
            if not victims:
                return
            victim = min(victims, key=lambda resident: (resident.remaining, resident.adapter_id))
            last_step = victim.steps + math.ceil(TOLERANCE * victim.remaining)
            self._drains[victim.adapter_id] = Drain(view.adapter_id, last_step)
            self.counts.started += 1

    def _end_drains(
        self, blocked: Mapping[AdapterId, AdapterView], residents: Mapping[AdapterId, AdapterView], now: float
    ) -> None:
        for adapter_id in [a for a, until in self._reserved_until.items() if a not in blocked or now >= until]:
            if adapter_id in blocked:
                self.counts.expired += 1
            del self._reserved_until[adapter_id]
        for victim, drain in list(self._drains.items()):
            resident = residents.get(victim)
            if drain.beneficiary not in blocked:
                self.counts.called_off += 1
            elif resident is None or not resident.running:
                self.counts.finished += 1
                self._reserved_until[drain.beneficiary] = now + RESERVATION_S
            else:
                continue
            del self._drains[victim]

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        """May `view`'s adapter take on a request that needs so many steps? Only what ends before its drain does."""
        drain = self._drains.get(view.adapter_id)
        return drain is None or view.steps + steps_needed <= drain.last_step

    def forget(self, adapter_id: AdapterId) -> None:
        """An adapter was unloaded: nothing about it is kept."""
        self._reserved_until.pop(adapter_id, None)
        for victim, drain in list(self._drains.items()):
            if adapter_id in (victim, drain.beneficiary):
                del self._drains[victim]
                self.counts.called_off += 1
