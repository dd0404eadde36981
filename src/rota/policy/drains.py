"""A drain empties a slot by a deadline: the resident finishes its sequences and admits few others.

How long answers become is only estimated, so two step counts are fixed when a drain starts. The resident should be
empty after 1.2 × the steps that its sequences need by the mean of earlier answers. Requests that it admits meanwhile
must end before that by the longest of earlier answers. If only such requests still run then, the resident leaves.
Sequences that ran when the drain started may go on, up to 1.2 × the steps that they need by the longest of earlier
answers. Then the resident leaves in any case. What still runs when a resident leaves is parked with its KV.

A slot that is free sooner is kept for the adapter for which the drain was started. If slots have closed under their
residents, several drain for one adapter: all but the last leave a closed slot. The base model needs no slot and is
never seen here.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

from rota.core.events import DrainChanged, DrainState
from rota.core.ids import AdapterId
from rota.policy.slot_policy import SlotPolicy, Turn
from rota.policy.views import AdapterView, SlotsView, lacks_only_a_slot

TOLERANCE = 1.2
RESERVATION_S = 1.0
# A read from disk that takes longer than this is taken for one that never ends.
LONGEST_READ_S = 30.0
# This many absent adapters are looked at to find one that should have a resident's slot.
LOOK_AHEAD = 64

Views = Mapping[AdapterId, AdapterView]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDrain:
    """A resident that is to leave, for an adapter that needs its slot. Steps are counted as the resident's."""

    beneficiary: AdapterId
    first_step: int
    last_step: int  # after which it should be empty
    deadline: int  # after which it leaves, empty or not

    @classmethod
    def of(cls, resident: AdapterView, beneficiary: AdapterId, step_tokens: int) -> Self:
        prompt_steps, start = math.ceil(resident.prompt_left / step_tokens), resident.steps
        last_step = start + math.ceil(TOLERANCE * (prompt_steps + resident.remaining))
        deadline = start + math.ceil(TOLERANCE * (prompt_steps + resident.most_remaining))
        deadline = max(last_step, deadline)
        return cls(beneficiary=beneficiary, first_step=start, last_step=last_step, deadline=deadline)

    @property
    def length(self) -> int:
        return self.last_step - self.first_step

    def is_over(self, resident: AdapterView) -> bool:
        """Must the resident leave now? Beyond the last step only sequences that ran at the start keep it there."""
        if resident.steps < self.last_step:
            return False
        return resident.seated_in > self.first_step or resident.steps >= self.deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A slot that a drain has freed, and that the beneficiary has not taken yet."""

    giver: AdapterId
    since: float
    until: float
    awaits_read: bool = False  # the beneficiary's weights are not in host memory yet


class DrainingPolicy(SlotPolicy):
    """A policy under which residents drain; a subclass says which residents, and for which adapters."""

    most_drains: int  # at a time; told by the slots that a pass sees

    def __init__(self) -> None:
        self._drains: dict[AdapterId, OpenDrain] = {}  # by victim
        self._reservations: dict[AdapterId, Reservation] = {}  # by beneficiary
        self._called_off: list[tuple[AdapterId, AdapterId]] = []  # since the last pass
        self._interrupted: set[AdapterId] = set()  # left at the deadline, and have parked sequences since then
        self._unreadable: set[AdapterId] = set()  # did not come from disk while a slot was kept for them
        self._news: list[DrainChanged] = []

    @abstractmethod
    def blocked(self, slots: SlotsView, kept: Views, now: float) -> dict[AdapterId, AdapterView]:
        """Absent adapters that lack only a slot and may get a drain; adapters in `kept` have one already."""

    @abstractmethod
    def goes_before(self, absent: AdapterView, resident: AdapterView, now: float) -> bool:
        """May this resident drain for this adapter? If it may, a resident of a lower priority may too."""

    # ── what the scheduler asks ──────────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, now: float) -> None:
        for victim, beneficiary in self._called_off:
            self._tell(victim, beneficiary, DrainState.CALLED_OFF, now)
        self._called_off.clear()
        self._interrupted = {one for one in self._interrupted if (view := slots.absent.get(one)) and view.running}
        self._unreadable = {one for one in self._unreadable if slots.absent.get(one) and not slots.is_at_hand(one)}
        if not slots.absent and not self.beneficiaries:
            return
        # Half of the slots stay open to all adapters. Of two slots both may drain: otherwise the second of two starving
        # adapters would wait for two drains, one after the other.
        self.most_drains = max(2, math.ceil(slots.total / 2))
        # A drain goes on while KV is short for a moment: a new drain would give the resident a later deadline.
        found = map(slots.absent.get, self.beneficiaries)
        kept = {view.adapter_id: view for view in found if view and (view.waiting or view.running)}
        blocked = kept | self.blocked(slots, kept, now)
        residents = {resident.adapter_id: resident for resident in slots.residents}
        self._end_reservations(slots, blocked, now)
        self._end_drains(slots, blocked, residents, now)
        if slots.free <= len(self._reservations):
            self._start_drains(slots, blocked, now)

    @property
    def reserved(self) -> frozenset[AdapterId]:
        return frozenset(self._reservations)

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        """A draining resident admits only requests that end before it should be empty."""
        if any(reservation.giver == view.adapter_id for reservation in self._reservations.values()):
            return False
        drain = self._drains.get(view.adapter_id)
        return drain is None or view.steps + steps_needed <= drain.last_step

    def turns(self, slots: SlotsView, now: float) -> list[Turn]:
        """Residents that have reached their deadline leave, as soon as their beneficiaries can run."""
        if not self._drains:
            return []
        over = [
            (self.due_at(view), drain.beneficiary, resident.adapter_id)
            for resident in slots.residents
            if (drain := self._drains.get(resident.adapter_id))
            and drain.is_over(resident)
            and slots.may_leave(resident.adapter_id)
            and (view := slots.absent.get(drain.beneficiary))
            and slots.is_at_hand(drain.beneficiary)
            and lacks_only_a_slot(slots, view)
        ]
        return _turns([Turn(victim, beneficiary) for _, beneficiary, victim in sorted(over)], slots.surplus)

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        """When the first reservation lapses."""
        return min((reservation.until for reservation in self._reservations.values()), default=math.inf)

    def take_news(self) -> list[DrainChanged]:
        news, self._news = self._news, []
        return news

    def forget(self, adapter_id: AdapterId) -> None:
        self._reservations.pop(adapter_id, None)
        self._interrupted.discard(adapter_id)
        self._unreadable.discard(adapter_id)
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

    @property
    def interrupted(self) -> frozenset[AdapterId]:
        """Adapters that left at a deadline and have parked sequences since then."""
        return frozenset(self._interrupted)

    def may_start(self, kept: Views) -> int:
        """How many adapters it is worth to find: those that get no drain now, and those that may still get one."""
        more = self.most_drains - len(self._drains)
        return more + len(kept) + len(self._drains) + len(self._unreadable) if more > 0 else 0

    def _start_drains(self, slots: SlotsView, blocked: Views, now: float) -> None:
        unserved = [*self._unserved(blocked)]
        if not unserved or len(self._drains) >= self.most_drains:
            return
        victims = self._victims(slots)
        closed = max(0, slots.surplus - len(self._drains))  # closed slots that no drain empties yet
        for view in (*unserved[:1] * closed, *unserved):
            if len(self._drains) >= self.most_drains or not victims:
                return
            # No other resident may drain for an adapter if the one of the lowest priority may not.
            if not self.goes_before(view, victims[0], now):
                continue
            victim = victims.pop(0)
            self._drains[victim.adapter_id] = OpenDrain.of(victim, view.adapter_id, slots.step_tokens)
            self._tell(victim.adapter_id, view.adapter_id, DrainState.STARTED, now)

    def _unserved(self, blocked: Views) -> Iterator[AdapterView]:
        """Longest wait first. An adapter that drains is no beneficiary, and a beneficiary needs no second drain."""
        passed_by = self.beneficiaries.union(self._drains, self._unreadable)
        waiting = sorted(blocked.values(), key=lambda view: (self.due_at(view), view.adapter_id))
        return (view for view in waiting if view.adapter_id not in passed_by)

    def _victims(self, slots: SlotsView) -> list[AdapterView]:
        """Residents that may drain, the lowest priority first, and of these the shortest drain."""
        # A resident that may not leave could not be made to leave at the deadline either.
        able = [
            one
            for one in slots.residents
            if one.running and one.adapter_id not in self._drains and slots.may_leave(one.adapter_id)
        ]
        lengths = {one.adapter_id: OpenDrain.of(one, one.adapter_id, slots.step_tokens).length for one in able}
        return sorted(able, key=lambda one: (one.priority, lengths[one.adapter_id], one.adapter_id))

    def _end_reservations(self, slots: SlotsView, blocked: Views, now: float) -> None:
        for beneficiary, reservation in list(self._reservations.items()):
            is_closed = not slots.free and all(one.adapter_id != reservation.giver for one in slots.residents)
            if beneficiary not in blocked or is_closed:
                del self._reservations[beneficiary]
                continue
            reservation = _while_read(reservation, slots.is_being_read(beneficiary), now)
            self._reservations[beneficiary] = reservation
            if now >= reservation.until:
                self._tell(reservation.giver, beneficiary, DrainState.EXPIRED, now)
                del self._reservations[beneficiary]
                if reservation.awaits_read:
                    self._unreadable.add(beneficiary)

    def _end_drains(self, slots: SlotsView, blocked: Views, residents: Views, now: float) -> None:
        for victim, drain in list(self._drains.items()):
            resident, is_wanted = residents.get(victim), drain.beneficiary in blocked
            if resident is None or (is_wanted and not resident.running):
                self._tell(victim, drain.beneficiary, DrainState.FINISHED, now)
                if is_wanted:
                    reservation = Reservation(giver=victim, since=now, until=now + RESERVATION_S)
                    is_being_read = slots.is_being_read(drain.beneficiary)
                    self._reservations[drain.beneficiary] = _while_read(reservation, is_being_read, now)
                if (view := slots.absent.get(victim)) and view.running:
                    self._interrupted.add(victim)
            elif not is_wanted:
                self._tell(victim, drain.beneficiary, DrainState.CALLED_OFF, now)
            else:
                continue
            del self._drains[victim]

    def _tell(self, victim: AdapterId, beneficiary: AdapterId, state: DrainState, now: float) -> None:
        self._news.append(DrainChanged(at=now, victim=victim, beneficiary=beneficiary, state=state))


def _turns(over: list[Turn], surplus: int) -> list[Turn]:
    """The first residents leave closed slots: no adapter comes for them. After them each adapter comes once."""
    coming: dict[AdapterId, Turn] = {}
    for turn in over[surplus:]:
        coming.setdefault(turn.successor, turn)
    return [*over[:surplus], *coming.values()]


def _while_read(reservation: Reservation, is_being_read: bool, now: float) -> Reservation:
    """A slot is kept while its adapter is being read from disk; its usual time begins when the read has ended."""
    if is_being_read == reservation.awaits_read:
        return reservation
    until = reservation.since + LONGEST_READ_S if is_being_read else now + RESERVATION_S
    return replace(reservation, until=until, awaits_read=is_being_read)


def outranking(slots: SlotsView, most: int) -> list[AdapterView]:
    """Adapters that lack only a slot and have a higher priority than some resident, among those that are due first."""
    if not slots.has_priorities or most <= 0:
        return []
    # A pinned resident drains for no adapter, however low its priority is.
    least = min((resident.priority for resident in slots.residents if not resident.is_pinned), default=math.inf)
    first = islice(slots.absent, LOOK_AHEAD)
    able = (view for view in first if view.priority > least and lacks_only_a_slot(slots, view))
    return list(islice(able, most))
