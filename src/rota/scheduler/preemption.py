"""Preemption makes room: for requests of a higher priority, and for tenants that hold less than their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cached_property

from rota.core.ids import BASE
from rota.policy.fairness import gives_up, may_take
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import Group
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.sequence import Reason, Refusal, Sequence, first_to_yield
from rota.scheduler.state import SchedulerState

# ── urgency ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Urgency makes room for requests of a higher priority: the newest sequence of the lowest priority yields.

# An urgent request waits this many steps before a sequence is preempted for it: mostly a row becomes free by itself,
# and a preempted sequence is computed again.
PATIENCE_STEPS = 4


class Urgency:
    """Acts within one tenant, before decodes are planned; where all priorities are equal it does nothing."""

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def make_room(self, builder: PlanBuilder) -> None:
        """Make room for at most one request in a pass, so that a burst of urgent ones does not empty the device."""
        state = self._state
        if len(state.priorities) < 2:
            return
        self._make_room_to_grow(builder)
        if not state.waiting:
            return
        urgent = max(self._urgent(builder.now), key=lambda one: (one.priority, -one.arrival[0]), default=None)
        if urgent and self._is_short(builder, urgent) and self._make_room_for(builder, urgent):
            builder.invited.append(urgent)

    def _urgent(self, now: float) -> Iterator[Sequence]:
        """The most urgent sequences of tenants that have waited for some steps."""
        lowest = min(self._state.priorities)
        latest = now - PATIENCE_STEPS * self._state.step_s
        for group in self._state.open_groups:
            for first in group.queue.in_turn(LOOK_AHEAD):
                sequence = group.queue.shortest_of(first.account)
                if sequence and sequence.priority > lowest and sequence.request.arrived_at <= latest:
                    yield sequence

    def _is_short(self, builder: PlanBuilder, urgent: Sequence) -> bool:
        """Does a sequence lack only a row or KV?"""
        if urgent in builder.invited or urgent.steps_in_flight or urgent.account.is_full:
            return False
        is_short = self._lacks_row(builder, urgent) or self._lacks_kv(builder, urgent)
        return is_short and self._admission.lets_in(urgent, self._state.group_of(urgent))

    def _make_room_for(self, builder: PlanBuilder, urgent: Sequence) -> bool:
        own = (one for one in self._state.running() if one.account is urgent.account)
        yielding = self._in_turn([one for one in own if one.priority < urgent.priority])
        # To preempt others in vain would be so in the next pass too: no request would ever end.
        if self._lacks_row(builder, urgent) and not self._would_have_row(builder, urgent, yielding):
            return False
        if self._lacks_kv(builder, urgent) and not self._would_have_kv(builder, urgent, yielding):
            return False
        while self._lacks_row(builder, urgent) or self._lacks_kv(builder, urgent):
            if not yielding:
                return False
            self._state.preempt(yielding.pop(), builder)
        return True

    def _lacks_row(self, builder: PlanBuilder, urgent: Sequence) -> bool:
        state = self._state
        return state.rows.available <= len(builder.invited) or not state.has_row(state.group_of(urgent))

    def _lacks_kv(self, builder: PlanBuilder, urgent: Sequence) -> bool:
        blocks = self._state.blocks
        promised = sum(blocks.blocks_for(one.length) for one in builder.invited)
        return self._admission.lacks_kv(urgent, promised + len(self._state.growing()))

    def _would_have_row(self, builder: PlanBuilder, urgent: Sequence, yielding: list[Sequence]) -> bool:
        """Is there a row for `urgent` without these, and one for each beside it? See `SchedulerState.has_row`."""
        state, rows = self._state, self._state.rows
        open_ids = {group.adapter_id for group in state.open_groups}
        given_up = sum(one.row is not None and one.request.adapter_id in open_ids for one in yielding)
        if rows.available + given_up <= len(builder.invited):
            return False
        left = Counter(one.request.adapter_id for one in state.running())
        left.subtract(one.request.adapter_id for one in yielding)
        if left.total() < rows.total:
            return True
        left[urgent.request.adapter_id] += 1
        return left.pop(BASE, 0) + max(left.values(), default=0) <= rows.total

    def _would_have_kv(self, builder: PlanBuilder, urgent: Sequence, yielding: list[Sequence]) -> bool:
        """Are there blocks for `urgent` without these? As in `Admission`, one is left for each that still runs."""
        state, blocks = self._state, self._state.blocks
        could_be_free = blocks.free + sum(len(one.held_blocks) for one in yielding)
        promised = sum(blocks.blocks_for(one.length) for one in builder.invited) + len(state.growing() - {*yielding})
        still_running = state.running_count - len(yielding)
        return blocks.blocks_for(urgent.length) + promised + still_running <= could_be_free

    def _make_room_to_grow(self, builder: PlanBuilder) -> None:
        """Free the blocks that decodes need in this step, or else the order of adapters would decide who finds none."""
        state = self._state
        if state.blocks.free >= state.running_count or state.accounts.are_shared:
            return
        growing = state.growing()
        if state.blocks.free >= len(growing):
            return
        running = list(state.running())
        highest = max(one.priority for one in running)
        yielding = self._in_turn([one for one in running if one.priority < highest])
        while yielding and state.blocks.free < len(growing):
            victim = yielding.pop()
            state.preempt(victim, builder)
            growing.discard(victim)

    def _in_turn(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequence that yields first is the last."""
        open_ids = {group.adapter_id for group in self._state.open_groups}
        return sorted(sequences, key=lambda one: first_to_yield(one, open_ids))


# ── running tenants ─────────────────────────────────────────────────────────────────────────────────────────────────
# The running tenants are a look at all running sequences by tenant, made once for all decisions of a pass.


class RunningTenants:
    """Of each tenant the sequences in the order in which they give up their place, the first one last."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._sequences: dict[Account, list[Sequence]] = {}
        for sequence in state.running():
            self._sequences.setdefault(sequence.account, []).append(sequence)
        self._open_ids = {group.adapter_id for group in state.open_groups}
        self._is_sorted: set[Account] = set()

    @property
    def accounts(self) -> Collection[Account]:
        return self._sequences.keys()

    def first_to_go(self, account: Account, has_row: bool) -> Sequence:
        """The first sequence of a tenant to give up its place, or the first one that has a row."""
        sequences = self._sequences[account]
        if account not in self._is_sorted:
            sequences.sort(key=lambda one: first_to_yield(one, self._open_ids))
            self._is_sorted.add(account)
        return next(one for one in reversed(sequences) if one.row is not None or not has_row)

    def remove(self, sequence: Sequence) -> None:
        """The first one to go of its tenant was preempted."""
        account = sequence.account
        self._sequences[account].remove(sequence)
        self._spare[account] = self._spare_of(account)

    def could_free(self, taker: Account) -> int:
        """The blocks of all sequences that other tenants could lose: of each tenant all but the oldest."""
        return sum(self._spare.values()) - self._spare.get(taker, 0)

    @cached_property
    def _spare(self) -> dict[Account, int]:
        return {account: self._spare_of(account) for account in self._sequences}

    def _spare_of(self, account: Account) -> int:
        oldest = min(self._sequences[account], key=lambda one: one.arrival, default=None)
        return account.blocks - len(oldest.held_blocks) if oldest else 0


# ── sharing ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Sharing makes room for tenants that hold less than their share: sequences of tenants that hold more are preempted.

Held = Callable[[Account], int]

# How many waiting sequences of all adapters are looked at in a pass.
MOST_LOOKS = 64


class Sharing:
    """Acts before decodes are planned, since a sequence in the step can no longer be preempted.

    A preempted sequence keeps its tokens. Its KV stays findable until the blocks are needed, so with prefix caching it
    mostly goes on where it was.
    """

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._running: RunningTenants | None = None
        self._no_giver: set[tuple[Held, bool]] = set()

    def make_room(self, builder: PlanBuilder) -> None:
        if not self._state.accounts.are_shared:
            return
        self._running, self._no_giver = None, set()
        self._make_room_to_grow(builder)
        if not self._state.waiting:
            return
        left = MOST_LOOKS
        for group in self._groups(builder):
            for sequence in group.queue.in_turn(min(LOOK_AHEAD, left)):
                left -= 1
                if self._is_short(builder, sequence) and self._make_room_for(builder, sequence):
                    builder.invited.append(sequence)
                if len(builder.invited) == LOOK_AHEAD:
                    return
            if left <= 0:
                return

    def _groups(self, builder: PlanBuilder) -> list[Group]:
        """The adapters whose requests may start. If they are many, each pass begins with another one."""
        groups = self._state.open_groups
        first = builder.step_id % len(groups) if len(groups) * LOOK_AHEAD > MOST_LOOKS else 0
        return groups[first:] + groups[:first]

    def _make_room_to_grow(self, builder: PlanBuilder) -> None:
        """Free the blocks that decodes need in this step, before chance decides whose sequence finds none."""
        blocks = self._state.blocks
        if blocks.free >= self._state.running_count:
            return
        growing = self._state.growing()
        while blocks.free < len(growing) and (victim := self._victim(None, blocks.total, _blocks)):
            self._preempt(builder, victim)
            growing.discard(victim)

    def make_row(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Free a row for a sequence that holds KV already, if its tenant has less than its share of the rows."""
        self._running, self._no_giver = None, set()  # rows have changed hands since then
        return self._take(builder, sequence.account, self._state.rows.total, _rows, 1)

    def _is_short(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Does a sequence lack only a row or KV?"""
        if sequence.steps_in_flight or sequence.account.is_full:
            return False
        state, group = self._state, self._state.group_of(sequence)
        is_short = not state.has_row(group) or self._lacks_row(builder) or self._lacks_kv(builder, sequence)
        return is_short and self._admission.lets_in(sequence, group)

    def _make_room_for(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        state, taker = self._state, sequence.account
        if not state.has_row(state.group_of(sequence)) and not self._may_take(taker, state.rows.total, _rows, 1):
            return False
        while self._lacks_row(builder):
            if not self._take(builder, taker, state.rows.total, _rows, 1):
                return False
        needed = state.blocks.blocks_for(len(sequence.tokens))
        if self._lacks_kv(builder, sequence) and state.blocks.free + self._seen.could_free(taker) < needed:
            return False  # to preempt others would be in vain, in this pass and in the next
        while self._lacks_kv(builder, sequence):
            if not self._take(builder, taker, state.blocks.total, _blocks, needed):
                return False
        return True

    def _lacks_row(self, builder: PlanBuilder) -> bool:
        return self._state.rows.available <= len(builder.invited)

    def _lacks_kv(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        blocks = self._state.blocks
        promised = sum(blocks.blocks_for(len(one.tokens)) for one in builder.invited)
        # In this step some sequences that run get one more block, before the new one gets its blocks.
        promised += -(-self._state.running_count // blocks.block_size)
        return self._admission.lacks_kv(sequence, promised)

    def _take(self, builder: PlanBuilder, taker: Account, total: int, held: Held, more: int) -> bool:
        """Preempt one sequence of another tenant for `taker`; False if `taker` has no right to that."""
        if not self._may_take(taker, total, held, more):
            return False
        victim = self._victim(taker, total, held)
        if victim:
            self._preempt(builder, victim)
        return victim is not None

    def _may_take(self, taker: Account, total: int, held: Held, more: int) -> bool:
        return may_take(taker, self._state.accounts.weights, total, held(taker), more)

    def _victim(self, taker: Account | None, total: int, held: Held) -> Sequence | None:
        """The sequence that gives up its place, of the tenant that holds most."""
        case = (held, taker is not None and not taker.seats)
        if case in self._no_giver:
            return None  # what no tenant gives up for one taker, it gives up for no other in this pass
        is_for_row = held is _rows
        able = (one for one in self._seen.accounts if one.rows > 1 or not is_for_row)
        giver = gives_up(able, taker, self._state.accounts.weights, total, held)
        if giver is None:
            self._no_giver.add(case)
            return None
        return self._seen.first_to_go(giver, is_for_row)

    @property
    def _seen(self) -> RunningTenants:
        """Looked at once a pass, when it is first needed."""
        if self._running is None:
            self._running = RunningTenants(self._state)
        return self._running

    def _preempt(self, builder: PlanBuilder, victim: Sequence) -> None:
        self._state.preempt(victim, builder)
        self._seen.remove(victim)
        victim.refusal = Refusal(Reason.OTHER_TENANT, builder.now)


def _rows(account: Account) -> int:
    return account.rows


def _blocks(account: Account) -> int:
    return account.blocks
