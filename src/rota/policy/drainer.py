"""The drainer makes room for an adapter that waits too long, by letting another one finish and admit little.

A drain has a deadline that is fixed when it starts: 1.2 × the steps its longest sequence still needed then. What it
admits meanwhile must fit into the steps that are left, so a drain always ends, and the slot it frees is kept for whom
it was started. Whoever is asked with a higher priority than all that a tenant has does not have to wait that long: the
tenant drains at once, so that slots do not turn priorities round. The base model needs no slot and is never seen here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rota.core.events import DrainState
from rota.core.ids import AdapterId
from rota.policy.views import AdapterView

TOLERANCE = 1.2
RESERVATION_S = 1.0


@dataclass(frozen=True, slots=True)
class Drain:
    """A victim on its way out, for somebody who starves."""

    beneficiary: AdapterId
    last_step: int  # the victim's step count at which it should be empty


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot that a drain has freed and that its beneficiary has not taken yet."""

    giver: AdapterId
    until: float


@dataclass(frozen=True, slots=True)
class DrainNews:
    """What became of a drain: those who watch want to know, nobody decides by it."""

    victim: AdapterId
    beneficiary: AdapterId
    state: DrainState


@dataclass(slots=True)
class LoRADrainer:
    """Watches waits once a pass; `max_wait_s` is what an adapter may wait before another drains for it.

    Where that is infinite, only priorities make anyone drain.
    """

    max_wait_s: float
    slots: int
    news: list[DrainNews] = field(default_factory=list)  # whoever passes them on empties it
    _drains: dict[AdapterId, Drain] = field(default_factory=dict)
    _reservations: dict[AdapterId, Reservation] = field(default_factory=dict)

    @property
    def draining_for(self) -> dict[AdapterId, AdapterId]:
        """Victim → beneficiary."""
        return {victim: drain.beneficiary for victim, drain in self._drains.items()}

    @property
    def reserved(self) -> frozenset[AdapterId]:
        """Adapters for which a freed slot is being kept."""
        return frozenset(self._reservations)

    @property
    def reserved_until(self) -> float:
        """When the first reservation lapses; infinity if there is none."""
        return min((reservation.until for reservation in self._reservations.values()), default=math.inf)

    @property
    def beneficiaries(self) -> frozenset[AdapterId]:
        """Adapters that somebody drains for, or has drained for."""
        return self.reserved.union(drain.beneficiary for drain in self._drains.values())

    @property
    def most_drains(self) -> int:
        """Half of the slots stay open to everybody; but of two both may drain, or the second of two who starve would
        wait for two drains, one after the other."""
        return max(2, math.ceil(self.slots / 2))

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
        self._end_reservations(blocked, now)
        self._end_drains(blocked, residents, now)
        if free_slots > len(self._reservations):
            return
        for view in self._unserved(blocked):
            if len(self._drains) >= self.most_drains:
                return
            victims = [resident for resident in residents.values() if self._may_drain(resident, view, now)]
            if not victims:
                continue
            victim = min(victims, key=lambda resident: (resident.priority, resident.remaining, resident.adapter_id))
            last_step = victim.steps + math.ceil(TOLERANCE * victim.remaining)
            self._drains[victim.adapter_id] = Drain(view.adapter_id, last_step)
            self._tell(victim.adapter_id, view.adapter_id, DrainState.STARTED)

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        """May `view`'s adapter take on a request that needs so many steps? Only what ends before its drain does."""
        if any(reservation.giver == view.adapter_id for reservation in self._reservations.values()):
            return False
        drain = self._drains.get(view.adapter_id)
        return drain is None or view.steps + steps_needed <= drain.last_step

    def forget(self, adapter_id: AdapterId) -> None:
        """An adapter was unloaded: nothing about it is kept."""
        self._reservations.pop(adapter_id, None)
        for victim, drain in list(self._drains.items()):
            if adapter_id in (victim, drain.beneficiary):
                del self._drains[victim]
                self._tell(victim, drain.beneficiary, DrainState.CALLED_OFF)

    def _tell(self, victim: AdapterId, beneficiary: AdapterId, state: DrainState) -> None:
        self.news.append(DrainNews(victim, beneficiary, state))

    def _unserved(self, blocked: Mapping[AdapterId, AdapterView]) -> Iterator[AdapterView]:
        """Longest wait first. Who drains is no beneficiary, and who has one needs no second."""
        passed_by = self.beneficiaries.union(self._drains)
        waiting = sorted(blocked.values(), key=lambda view: (view.oldest_at, view.adapter_id))
        return (view for view in waiting if view.adapter_id not in passed_by)

    def _may_drain(self, resident: AdapterView, view: AdapterView, now: float) -> bool:
        """For `view`, which starves or goes before it."""
        if not resident.running or resident.is_pinned or resident.adapter_id in self._drains:
            return False
        return now > self.starving_at(view) or view.priority > resident.priority

    def _end_reservations(self, blocked: Mapping[AdapterId, AdapterView], now: float) -> None:
        for beneficiary, reservation in list(self._reservations.items()):
            if beneficiary in blocked and now < reservation.until:
                continue
            if beneficiary in blocked:
                self._tell(reservation.giver, beneficiary, DrainState.EXPIRED)
            del self._reservations[beneficiary]

    def _end_drains(
        self, blocked: Mapping[AdapterId, AdapterView], residents: Mapping[AdapterId, AdapterView], now: float
    ) -> None:
        for victim, drain in list(self._drains.items()):
            resident = residents.get(victim)
            if drain.beneficiary not in blocked:
                self._tell(victim, drain.beneficiary, DrainState.CALLED_OFF)
            elif resident is None or not resident.running:
                self._tell(victim, drain.beneficiary, DrainState.FINISHED)
                self._reservations[drain.beneficiary] = Reservation(victim, now + RESERVATION_S)
            else:
                continue
            del self._drains[victim]
