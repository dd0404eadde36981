"""A drain empties a slot without a pause in any answer: the resident finishes its sequences and admits few others.

The deadline of a drain is fixed when the drain starts: 1.2 × the steps that the resident's longest sequence still
needs. Requests that the resident admits meanwhile must fit into the steps that are left, so a drain always ends. The
freed slot is kept for the adapter for which the drain was started. The base model needs no slot and is never seen
here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from rota.core.events import DrainChanged, DrainState
from rota.core.ids import AdapterId
from rota.policy.slot_policy import SlotPolicy
from rota.policy.views import AdapterView, SlotsView

TOLERANCE = 1.2
RESERVATION_S = 1.0
# This many absent adapters are looked at to find one that should have a resident's slot.
LOOK_AHEAD = 64

Views = Mapping[AdapterId, AdapterView]


@dataclass(frozen=True, slots=True)
class Drain:
    """A resident that is to leave, for an adapter that needs its slot."""

    beneficiary: AdapterId
    last_step: int  # the resident's step count at which it should be empty


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot that a drain has freed, and that the beneficiary has not taken yet."""

    giver: AdapterId
    until: float


class DrainingPolicy(SlotPolicy):
    """A policy under which residents drain; a subclass says which residents, and for which adapters."""

    def __init__(self, slots: int) -> None:
        # Half of the slots stay open to all adapters. Of two slots both may drain: otherwise the second of two starving
        # adapters would wait for two drains, one after the other.
        self.most_drains = max(2, math.ceil(slots / 2))
        self._drains: dict[AdapterId, Drain] = {}  # by victim
        self._reservations: dict[AdapterId, Reservation] = {}  # by beneficiary
        self._called_off: list[tuple[AdapterId, AdapterId]] = []  # since the last pass
        self._news: list[DrainChanged] = []

    @abstractmethod
    def blocked(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        """Absent adapters that lack only a slot and may get a drain; adapters in `kept` have one already."""

    @abstractmethod
    def goes_before(self, absent: AdapterView, resident: AdapterView, now: float) -> bool:
        """May this resident drain for this adapter?"""

    # ── what the scheduler asks ──────────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, now: float) -> None:
        for victim, beneficiary in self._called_off:
            self._tell(victim, beneficiary, DrainState.CALLED_OFF, now)
        self._called_off.clear()
        if not slots.absent and not self.beneficiaries:
            return
        # A drain goes on while KV is short for a moment: a new drain would give the resident a later deadline.
        found = map(slots.absent.get, self.beneficiaries)
        kept = {view.adapter_id: view for view in found if view and view.waiting}
        blocked = kept | self.blocked(slots, kept, now)
        residents = {resident.adapter_id: resident for resident in slots.residents}
        self._end_reservations(blocked, now)
        self._end_drains(blocked, residents, now)
        if slots.free <= len(self._reservations):
            self._start_drains(blocked, residents, now)

    @property
    def reserved(self) -> frozenset[AdapterId]:
        return frozenset(self._reservations)

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        """A draining resident admits only requests that end before its drain does."""
        if any(reservation.giver == view.adapter_id for reservation in self._reservations.values()):
            return False
        drain = self._drains.get(view.adapter_id)
        return drain is None or view.steps + steps_needed <= drain.last_step

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        """When the first reservation lapses."""
        return min((reservation.until for reservation in self._reservations.values()), default=math.inf)

    def take_news(self) -> list[DrainChanged]:
        news, self._news = self._news, []
        return news

    def forget(self, adapter_id: AdapterId) -> None:
        self._reservations.pop(adapter_id, None)
        for victim, drain in list(self._drains.items()):
            if adapter_id in (victim, drain.beneficiary):
                del self._drains[victim]
                self._called_off.append((victim, drain.beneficiary))

    # ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def draining_for(self) -> dict[AdapterId, AdapterId]:
        """Victim → beneficiary."""
        return {victim: drain.beneficiary for victim, drain in self._drains.items()}

    @property
    def beneficiaries(self) -> frozenset[AdapterId]:
        """Adapters for which a resident drains, or has drained."""
        return self.reserved.union(drain.beneficiary for drain in self._drains.values())

    def _start_drains(self, blocked: Views, residents: Views, now: float) -> None:
        for view in self._unserved(blocked):
            if len(self._drains) >= self.most_drains:
                return
            victims = [resident for resident in residents.values() if self._may_drain(resident, view, now)]
            if not victims:
                continue
            victim = min(victims, key=lambda resident: (resident.priority, resident.remaining, resident.adapter_id))
            last_step = victim.steps + math.ceil(TOLERANCE * victim.remaining)
            self._drains[victim.adapter_id] = Drain(view.adapter_id, last_step)
            self._tell(victim.adapter_id, view.adapter_id, DrainState.STARTED, now)

    def _unserved(self, blocked: Views) -> Iterator[AdapterView]:
        """Longest wait first. An adapter that drains is no beneficiary, and a beneficiary needs no second drain."""
        passed_by = self.beneficiaries.union(self._drains)
        waiting = sorted(blocked.values(), key=lambda view: (view.oldest_at, view.adapter_id))
        return (view for view in waiting if view.adapter_id not in passed_by)

    def _may_drain(self, resident: AdapterView, view: AdapterView, now: float) -> bool:
        if not resident.running or resident.is_pinned or resident.adapter_id in self._drains:
            return False
        return self.goes_before(view, resident, now)

    def _end_reservations(self, blocked: Views, now: float) -> None:
        for beneficiary, reservation in list(self._reservations.items()):
            if beneficiary in blocked and now < reservation.until:
                continue
            if beneficiary in blocked:
                self._tell(reservation.giver, beneficiary, DrainState.EXPIRED, now)
            del self._reservations[beneficiary]

    def _end_drains(self, blocked: Views, residents: Views, now: float) -> None:
        for victim, drain in list(self._drains.items()):
            resident = residents.get(victim)
            if drain.beneficiary not in blocked:
                self._tell(victim, drain.beneficiary, DrainState.CALLED_OFF, now)
            elif resident is None or not resident.running:
                self._tell(victim, drain.beneficiary, DrainState.FINISHED, now)
                self._reservations[drain.beneficiary] = Reservation(victim, now + RESERVATION_S)
            else:
                continue
            del self._drains[victim]

    def _tell(self, victim: AdapterId, beneficiary: AdapterId, state: DrainState, now: float) -> None:
        self._news.append(DrainChanged(at=now, victim=victim, beneficiary=beneficiary, state=state))


def outranking(slots: SlotsView) -> Iterator[AdapterView]:
    """Adapters that lack only a slot and have a higher priority than some resident, among those that are due first."""
    if not slots.has_priorities:
        return
    least = min((resident.priority for resident in slots.residents), default=math.inf)
    for view in islice(slots.absent, LOOK_AHEAD):
        if view.priority > least and slots.can_start(view.adapter_id):
            yield view
