"""Reads bring adapters into host memory: which are ordered, when, and which leave for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from rota.core.adapter import Adapter
from rota.core.events import HostChanged, HostState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched
from rota.scheduler.adapter_state import Group, Standing
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.state import SchedulerState

# ── reads ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Reads bring adapters into host memory, and tell observers what lies there.


def order_read(state: SchedulerState, builder: PlanBuilder, adapter: Adapter, is_idle: bool = False) -> None:
    """An adapter will be read from disk with the next step; the caller has made room. `is_idle`: no request waits."""
    (builder.idle_fetches if is_idle else builder.fetches).append(adapter)
    state.hosts.begin_fetch(adapter, builder.now)
    state.absent.missing.discard(adapter.adapter_id)
    _tell(state, adapter.adapter_id, HostState.READING, builder.now)


def finish_read(state: SchedulerState, fetched: AdapterFetched) -> None:
    """An adapter lies in host memory."""
    state.hosts.finish_fetch(fetched.adapter_id)
    _tell(state, fetched.adapter_id, HostState.HELD, fetched.at, fetched)


def forget_copy(state: SchedulerState, adapter_id: AdapterId, at: float) -> None:
    """An adapter is no longer in host memory, nor on its way there."""
    if state.hosts.has(adapter_id) or state.hosts.is_fetching(adapter_id):
        _tell(state, adapter_id, HostState.GONE, at)
    state.hosts.forget(adapter_id)


def _tell(
    state: SchedulerState,
    adapter_id: AdapterId,
    now: HostState,
    at: float,
    fetched: AdapterFetched | None = None,
) -> None:
    state.outbox.append(
        HostChanged(
            at=at,
            adapter_id=adapter_id,
            state=now,
            engine_id=state.engine_id,
            size_bytes=fetched.size_bytes if fetched else 0,
            rank=fetched.rank if fetched else 0,
            seals=fetched.seals if fetched else (),
        )
    )


# ── host victims ────────────────────────────────────────────────────────────────────────────────────────────────────
# Host victims are the adapters that leave host memory for others, found with bounded work in a pass.

# First whether the adapter could not run yet, then when its weights will be needed.
WantedAt = tuple[bool, float]
FIRST: WantedAt = (False, -1e9)

# This many adapters in host memory, the longest unused first, are looked at to find some that no request needs there.
MOST_HELD = 256
# And this many of the adapters that are due last, if requests need all of those.
MOST_LAST = 64
# Of these, this many are asked whether they could run.
MOST_ASKED = 8


class HostVictims:
    """Idle adapters leave first, then adapters whose weights are in a slot, then those that will be wanted last."""

    def __init__(
        self, state: SchedulerState, wanted_at: Callable[[Group], WantedAt], keeps_running: bool = False
    ) -> None:
        """With `keeps_running` no adapter leaves whose answers have begun: a read would pause them."""
        self._state = state
        self._keeps_running = keeps_running
        self._wanted_at = wanted_at
        self._idle: deque[AdapterId] = deque()
        self._seated: deque[AdapterId] = deque()  # their requests do not need them in host memory
        self._asked: dict[AdapterId, WantedAt] = {}
        self._found_in = 0  # the step in which these were found

    def next(self, step_id: int, wanted_at: WantedAt, first: frozenset[AdapterId]) -> AdapterId | None:
        """The adapter that leaves for one that is wanted at this time; None if all others are wanted sooner.

        The adapters in `first` are wanted before any others. They leave for a new adapter only.
        """
        self._find(step_id)
        if spare := self._idle or self._seated:
            return spare[0]
        kept: AdapterId | None = None
        for group in self._last():
            if self._keeps_running and group.running:
                continue
            if group.adapter_id in first:
                kept = kept or group.adapter_id
                continue
            if group.adapter_id not in self._asked:
                if len(self._asked) == MOST_ASKED:
                    break
                self._asked[group.adapter_id] = self._wanted_at(group)
            if self._asked[group.adapter_id] > wanted_at:
                return group.adapter_id
        return kept if wanted_at < FIRST else None

    def next_spare(self, step_id: int, due_at: float) -> AdapterId | None:
        """The adapter that leaves for one that is due at this time, and does not need a slot yet."""
        self._find(step_id)
        if self._idle:
            return self._idle[0]
        # An adapter with parked sequences may be back before a read has ended; so may one that has a slot.
        last = next((group for group in self._last() if not group.running), None)
        return last.adapter_id if last and self._state.due_at(last) > due_at else None

    def drop(self, builder: PlanBuilder, victim: AdapterId) -> None:
        """An adapter that was found leaves host memory."""
        state = self._state
        for found in (self._idle, self._seated):
            if found and found[0] == victim:
                found.popleft()
        forget_copy(state, victim, builder.now)
        state.note_users(state.groups[victim])
        builder.drops.append(victim)

    def _last(self) -> list[Group]:
        """Adapters in host memory that have requests and no slot, due last first."""
        return self._state.absent.at_hand.last(MOST_LAST)

    def _find(self, step_id: int) -> None:
        if self._found_in == step_id:
            return
        state, self._found_in = self._state, step_id
        self._idle, self._seated, self._asked = deque(), deque(), {}
        idle_in_slots: list[AdapterId] = []  # requests may come for them that must not wait for a read later
        for adapter_id in islice(state.hosts.held, MOST_HELD):
            residency = state.slots.residencies.get(adapter_id)
            if residency and not residency.is_ready:
                continue  # it is being copied from host memory
            group = state.groups[adapter_id]
            if group.users:
                if residency and not self._keeps_running:
                    self._seated.append(adapter_id)
            elif residency or not group.wants_slot:  # else it is pinned, and would only be read again for its slot
                (idle_in_slots if residency and self._keeps_running else self._idle).append(adapter_id)
        if not state.absent.at_hand and not state.hosts.reads:
            # No adapter will come that takes a slot from one of these. Unless one is dropped, no other is ever read.
            self._idle.extend(idle_in_slots[:1])


# ── fetching ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Fetching orders adapters from disk into host memory, and drops another adapter if host memory is full.

# In a pass, behind the adapters that a policy names, this many are looked at to find some that should be read. This
# many of all are tried.
MOST_LOOKS, MOST_TRIES = 64, 8
# This many absent adapters, first due first, are to lie in host memory before a slot is free for them.
MOST_AHEAD = 8
# A disk reads one adapter after another, so an adapter that is due sooner waits for at most this many reads ahead.
MOST_READS = 2
# Sources bring as many side by side, and the disk is free meanwhile.
MOST_FAR_READS = 4


class Fetching:
    """Only an adapter whose weights lie in host memory can be copied into a slot."""

    def __init__(self, state: SchedulerState, admission: Admission, keeps_running: bool = False) -> None:
        self._state = state
        self._admission = admission
        self._victims = HostVictims(state, self._wanted_at, keeps_running)
        self._first: frozenset[AdapterId] = frozenset()

    def order(self, builder: PlanBuilder, first: list[AdapterId]) -> None:
        """Once a pass: order the adapters that would come next if they were in host memory."""
        self._first = frozenset(first)
        if not self._state.absent.missing:
            return  # every adapter is in host memory, or on its way there
        no_room_from: WantedAt | None = None
        for group in islice(filter(self._is_missing, self._next_in_line(first)), MOST_TRIES):
            # If an adapter that is wanted sooner found no room, an adapter that is wanted later finds none either.
            wanted_at = self._wanted_at(group)
            if (no_room_from is None or wanted_at < no_room_from) and not self.try_fetch(builder, group):
                no_room_from = wanted_at
        self._read_ahead(builder)

    def try_fetch(self, builder: PlanBuilder, group: Group) -> bool:
        """Order an adapter into host memory, and drop another if it is full.

        False if no other can be dropped, or if it must not be read beside those that are being read.
        """
        hosts = self._state.hosts
        assert group.adapter is not None
        if not hosts.lets_read(group.adapter, builder.now):
            return False
        if hosts.is_full:
            victim = self._victims.next(builder.step_id, self._wanted_at(group), self._first)
            if victim is None:
                return False
            self._victims.drop(builder, victim)
        order_read(self._state, builder, group.adapter)
        return True

    def _read_ahead(self, builder: PlanBuilder) -> None:
        """Drops an adapter only for one that is wanted sooner, so no adapter is read twice before it is used."""
        hosts = self._state.hosts
        for group in filter(self._is_missing, islice(self._state.absent, MOST_AHEAD)):
            assert group.adapter is not None
            is_far = group.adapter.is_far
            if hosts.reads_like(is_far) >= (MOST_FAR_READS if is_far else MOST_READS):
                continue
            if not hosts.lets_read(group.adapter, builder.now):
                continue
            if hosts.is_full:
                spare = self._victims.next_spare(builder.step_id, self._state.due_at(group))
                if spare is None:
                    return
                self._victims.drop(builder, spare)
            order_read(self._state, builder, group.adapter)

    def _next_in_line(self, first: list[AdapterId]) -> Iterator[Group]:
        """Adapters that the policy names, then absent ones, first due first, up to the first that could come now."""
        state = self._state
        missing = state.absent.missing
        yield from (state.groups[adapter_id] for adapter_id in first if adapter_id in missing)
        yield from islice(self._first_due(), MOST_LOOKS)

    def _first_due(self) -> Iterator[Group]:
        state, passed_over = self._state, 0
        for group in state.absent:
            if state.hosts.has(group.adapter_id) and self._admission.can_work(group):
                return
            yield group
            passed_over += not state.hosts.is_fetching(group.adapter_id)
            if passed_over == LOOK_AHEAD:
                yield from self._parked_behind(group)
                return

    def _parked_behind(self, group: Group) -> Iterator[Group]:
        """Of a thousand adapters behind `group`, only parked ones are worth a look: they hold KV already."""
        for parked in self._state.absent.parked.later_than(self._state.due_at(group), group.adapter_id):
            if self._state.hosts.has(parked.adapter_id):
                return
            yield parked

    def _is_missing(self, group: Group) -> bool:
        return group.adapter_id in self._state.absent.missing

    def _wanted_at(self, group: Group) -> WantedAt:
        """When an adapter without a slot will be copied into one; after all others if it could not run there."""
        if group.standing is Standing.NEW:
            return (False, -math.inf)  # the client that adds an adapter waits to be told that it can be read
        if group.adapter_id in self._first:
            return FIRST
        return (not self._admission.can_work(group), self._state.due_at(group))
