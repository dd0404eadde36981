"""Turns decide, once a pass, which adapters hold the device's slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from itertools import islice

from rota.core.events import SlotChanged, SlotReason, SlotState
from rota.core.ids import AdapterId, Slot
from rota.core.plan import Load
from rota.policy.fairness import may_take
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import Group
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.reads import Fetching
from rota.scheduler.state import Absent, SchedulerState

# ── slot mover ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Moves take adapters into slots and out of slots, and tell observers about it.


class SlotMover:
    """With overlap a copy runs beside the steps; without it the step itself waits for the copy."""

    def __init__(self, state: SchedulerState, is_overlapped: bool, is_eager: bool) -> None:
        self._state = state
        self.is_overlapped = is_overlapped
        self.is_eager = is_eager

    def land(self, builder: PlanBuilder) -> None:
        """Adapters whose copies earlier plans ordered may be in this step: on the device the step waits for them.

        Copies are made one after the other beside the step before this one. A copy that is not complete when that step
        ends would make this whole step longer. So such an adapter, and those behind it, wait for the message.
        """
        state = self._state
        if not self.is_eager:
            return
        left_s = state.step_s
        for adapter_id in state.slots.on_their_way:
            copy_s = state.expected_copy_s(state.groups[adapter_id])
            left_s -= copy_s
            if not copy_s or left_s < 0:
                return
            arrive(state, adapter_id, builder.now)

    def move_in(self, builder: PlanBuilder, group: Group, reason: SlotReason) -> None:
        """Order an adapter's copy into an empty slot."""
        state = self._state
        place = state.slots.begin_load(group.adapter_id)
        state.hosts.use(group.adapter_id)
        state.note_users(group)
        load = Load(
            adapter_id=group.adapter_id,
            slot=place.slot,
            is_awaited=not self.is_overlapped,
            pages=place.pages,
            matrices=place.matrices,
        )
        builder.loads.append(load)
        _tell(state, place.slot, group.adapter_id, SlotState.LOADING, builder.now, reason)
        if not self.is_overlapped:
            arrive(state, group.adapter_id, builder.now)

    def replace(self, builder: PlanBuilder, leaver: Group, successor: Group) -> None:
        """A busy resident's slot goes to another adapter: the resident leaves, and its slot is loaded meanwhile.

        While there are more residents than open slots, the resident leaves and the other adapter waits on.
        """
        vacate(self._state, leaver, builder.now, SlotReason.TURN_OVER)
        if self._state.slots.empty:
            self.move_in(builder, successor, SlotReason.TURN_COME)


def arrive(state: SchedulerState, adapter_id: AdapterId, at: float) -> None:
    """An adapter's weights are in their slot, or will be before the next step reads them."""
    state.slots.finish_load(adapter_id)
    group = state.groups[adapter_id]
    group.slot_since, group.steps_before = at, group.steps
    _tell(state, state.slots.residencies[adapter_id].slot, adapter_id, SlotState.READY, at)
    state.note_slots()


def vacate(state: SchedulerState, group: Group, at: float, reason: SlotReason, detail: str = "") -> None:
    """A slot is free from now on; its former resident's sequences are parked."""
    slot = state.slots.vacate(group.adapter_id)
    state.note_readers(group.running_sequences(), at)
    state.note_users(group)
    state.note_slots()
    _tell(state, slot, group.adapter_id, SlotState.EMPTY, at, reason, detail)


def _tell(
    state: SchedulerState,
    slot: Slot,
    adapter_id: AdapterId,
    now: SlotState,
    at: float,
    reason: SlotReason | None = None,
    detail: str = "",
) -> None:
    state.outbox.append(
        SlotChanged(
            at=at,
            slot=slot,
            adapter_id=adapter_id,
            state=now,
            reason=reason,
            detail=detail,
            engine_id=state.engine_id,
        )
    )


# ── slot candidates ─────────────────────────────────────────────────────────────────────────────────────────────────
# Slot candidates are the residents that may leave their slot, and the absent adapters that may come into one.

# Copies into slots of busy residents that may be under way at a time: each takes a slot out of one step.
MOST_COPIES = 2
# The time of a step is not known before the first step.
LEAST_STEP_S = 0.001
# A pass looks at no more claimants than this, however many a policy asks for.
MOST_CLAIMANTS = 64


class SlotCandidates:
    """What a slot policy sees (`policy.views.SlotsView`); only here are pins and copies under way considered."""

    def __init__(self, state: SchedulerState, admission: Admission, is_overlapped: bool) -> None:
        self._state = state
        self._admission = admission
        self._is_overlapped = is_overlapped
        # What a policy asks for most is passed on without a call in between.
        self.absent: Absent = state.absent
        self.view_of: Callable[[AdapterId], Group | None] = state.groups.get
        # Do the adapter's weights lie in host memory, from where they can be copied into a slot?
        self.is_at_hand = state.hosts.has
        self.is_being_read = state.hosts.is_fetching

    @property
    def step_s(self) -> float:
        return max(self._state.step_s, LEAST_STEP_S)

    @property
    def copy_s(self) -> float:
        return self._state.copy_s

    @property
    def total(self) -> int:
        return self._state.slots.total

    @property
    def step_tokens(self) -> int:
        return self._state.step_tokens

    @property
    def has_priorities(self) -> bool:
        return len(self._state.priorities) > 1

    @property
    def blocks(self) -> int:
        return self._state.blocks.total

    @property
    def free_blocks(self) -> int:
        return self._state.blocks.free

    @property
    def adapter_blocks(self) -> int:
        return self._state.adapter_blocks

    def blocks_to_start(self, adapter_id: AdapterId) -> int:
        first = self._state.groups[adapter_id].queue.first()
        return self._state.blocks.blocks_for(len(first.tokens)) if first else 0

    # ── who may leave ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def residents(self) -> list[Group]:
        return self._state.residents

    @property
    def free(self) -> int:
        slots = self._state.slots
        return max(0, slots.empty + len(self.idle()) - slots.surplus)

    @property
    def surplus(self) -> int:
        return self._state.slots.surplus

    @property
    def copies(self) -> int:
        slots = self._state.slots
        return MOST_COPIES - len(slots.on_their_way) if self._is_overlapped else slots.total

    def idle(self) -> list[Group]:
        """Residents without a running sequence: they can leave and no answer stops."""
        return [group for group in self._state.residents if not group.running and self.may_leave(group.adapter_id)]

    def may_leave(self, adapter_id: AdapterId) -> bool:
        group, slots = self._state.groups[adapter_id], self._state.slots
        if group.is_pinned:
            return False
        if self._keeps_its_share(group):
            return False
        return slots.residencies[adapter_id].has_run or not self._admission.can_work(group)

    def _keeps_its_share(self, group: Group) -> bool:
        """Is it the only busy adapter of its tenant? Then no other tenant takes its slot.

        While there are more residents than open slots, any of them may have to leave.
        """
        if not self._state.accounts.are_shared or self._state.slots.surplus:
            return False
        account = group.main_account
        if account is None or len(account.adapters) > 1:
            return False
        return self._state.accounts.share(account, self._state.slots.total) >= 1.0

    # ── who may come ─────────────────────────────────────────────────────────────────────────────────────────────

    def can_start(self, adapter_id: AdapterId) -> bool:
        first = self._state.groups[adapter_id].queue.first()
        return first is not None and self._admission.has_room(first)

    def at_hand(self) -> Iterator[Group]:
        """Absent adapters whose weights lie in host memory, first due first."""
        return iter(self._state.absent.at_hand)

    def claimants(self) -> Iterator[Group]:
        """As `at_hand`, but only adapters that could run, and no more of them than a policy needs to choose among."""
        return islice(self._able(), MOST_CLAIMANTS)

    def _able(self) -> Iterator[Group]:
        """After a few adapters that lack KV, only adapters that hold KV."""
        state, lacking = self._state, 0
        for group in self.at_hand():
            if self._admission.can_work(group):
                yield group
            elif (lacking := lacking + 1) == LOOK_AHEAD:
                behind = state.absent.parked.later_than(state.due_at(group), group.adapter_id)
                yield from (one for one in islice(behind, MOST_CLAIMANTS) if self.is_at_hand(one.adapter_id))
                return


# ── slot shares ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Slot shares give each tenant its part of the slots; within its part, the slot policy decides.


class SlotShares:
    """A tenant that holds fewer slots than its share gets one at once, from the tenant that holds most."""

    def __init__(
        self, state: SchedulerState, admission: Admission, candidates: SlotCandidates, mover: SlotMover
    ) -> None:
        self._state = state
        self._admission = admission
        self._candidates = candidates
        self._mover = mover

    def give(self, builder: PlanBuilder) -> None:
        state = self._state
        if not state.accounts.are_shared or self._candidates.copies <= 0:
            return
        held = self._held()
        leavers = self._leavers(held)
        if not leavers:
            return
        for account in state.accounts.in_turn(LOOK_AHEAD):
            if held[account] + 1 > state.accounts.share(account, state.slots.total) and held[account]:
                continue
            if not self._give_to(builder, account, leavers):
                continue
            held = self._held()
            leavers = self._leavers(held)
            if not leavers or self._candidates.copies <= 0:
                return

    def _held(self) -> Counter[Account | None]:
        """How many slots each tenant holds."""
        seated = (self._state.groups[adapter_id] for adapter_id in self._state.slots.residencies)
        return Counter(group.main_account for group in seated if group.users)

    def _give_to(self, builder: PlanBuilder, account: Account, leavers: list[Group]) -> bool:
        """Give a tenant a slot that another tenant's adapter leaves, unless there is none."""
        leaver = next((group for group in leavers if group.main_account is not account), None)
        if leaver is None:
            return False
        own = map(self._state.groups.__getitem__, islice(account.adapters, LOOK_AHEAD))
        comer = next(filter(self._is_claimant, own), None)
        if comer is None:
            return False
        self._mover.replace(builder, leaver, comer)
        return True

    def _is_claimant(self, group: Group) -> bool:
        if group.adapter_id not in self._state.absent or not self._candidates.is_at_hand(group.adapter_id):
            return False
        return self._admission.can_work(group) or self._would_get_a_row(group)

    def _would_get_a_row(self, group: Group) -> bool:
        """Would another tenant make room for the group's first request, once its adapter is in a slot?"""
        first, state = group.queue.next(), self._state
        if first is None or first.steps_in_flight or first.account.is_full:
            return False
        return may_take(first.account, state.accounts.weights, state.rows.total, first.account.rows, 1)

    def _leavers(self, held: Counter[Account | None]) -> list[Group]:
        """Adapters of tenants that hold more than their share: of the tenant with most, the one that runs least first.

        A tenant holds most if its slots are most for its weight.
        """
        able = [
            group
            for group in self._state.residents
            if (owner := group.main_account) is not None
            and held[owner] > max(1.0, self._state.accounts.share(owner, self._state.slots.total))
            and self._candidates.may_leave(group.adapter_id)
        ]
        able.sort(key=lambda group: (self._level(group, held), -group.running, group.adapter_id), reverse=True)
        return able

    def _level(self, group: Group, held: Counter[Account | None]) -> float:
        owner = group.main_account
        assert owner is not None, "a group with users has an owner"
        return held[owner] / owner.weight


class Turns:
    """Gives away empty slots first, then idle residents' slots, then those that the policy takes from busy ones."""

    def __init__(
        self,
        state: SchedulerState,
        admission: Admission,
        fetching: Fetching,
        candidates: SlotCandidates,
        mover: SlotMover,
        shares: SlotShares,
        policy: SlotPolicy,
    ) -> None:
        self._state = state
        self._admission = admission
        self._fetching = fetching
        self._candidates = candidates
        self._mover = mover
        self._shares = shares
        self._policy = policy

    def take(self, builder: PlanBuilder) -> None:
        self._mover.land(builder)
        self._let_policy_observe(builder)
        if not self._state.absent:
            return
        self._fetching.order(builder, [*sorted(self._policy.reserved), *self._policy.wanted])
        idle = self._candidates.idle()
        if idle or self._state.slots.empty:
            self._fill(builder, idle)
        if self._state.absent:
            self._shares.give(builder)
            self._replace(builder)

    def _let_policy_observe(self, builder: PlanBuilder) -> None:
        policy = self._policy
        edition = policy.due_edition
        policy.observe(self._candidates, builder.now)
        if news := policy.take_news():  # a policy does not know which engine it decides for
            self._state.outbox += [replace(event, engine_id=self._state.engine_id) for event in news]
        if policy.due_edition != edition:
            self._state.sort_absent()

    # ── free slots ───────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, builder: PlanBuilder, idle: list[Group]) -> None:
        """Give away empty slots and those of idle residents."""
        state, reserved = self._state, self._policy.reserved
        kept = sum(
            adapter_id in state.absent for adapter_id in reserved
        )  # free slots that only reserved adapters may take
        for group in self._line(builder, idle, reserved):
            is_reserved = group.adapter_id in reserved
            self._close(builder, idle, group, is_reserved)
            if state.slots.empty + len(idle) <= (0 if is_reserved else kept):
                return
            if not self._candidates.is_at_hand(group.adapter_id):
                continue
            if state.slots.empty:
                self._mover.move_in(builder, group, SlotReason.SLOT_EMPTY)
            elif leaver := self._leaver(idle, group, is_reserved):
                idle.remove(leaver)
                vacate(state, leaver, builder.now, SlotReason.IDLE)
                self._mover.move_in(builder, group, SlotReason.RESIDENT_IDLE)
            elif self._admission.can_work(group):
                return  # adapters that are due later have no better claim
            else:
                continue
            kept -= is_reserved

    def _close(self, builder: PlanBuilder, idle: list[Group], successor: Group, is_reserved: bool) -> None:
        """Idle residents leave slots that have closed: only when all these are left can `successor` come."""
        while self._state.slots.surplus and (leaver := self._leaver(idle, successor, is_reserved)):
            idle.remove(leaver)
            vacate(self._state, leaver, builder.now, SlotReason.IDLE)

    def _line(self, builder: PlanBuilder, idle: list[Group], reserved: Set[AdapterId]) -> Iterator[Group]:
        """Adapters with a reserved slot; then any adapter while a slot is unused; then adapters that could start."""
        state = self._state
        yield from (state.groups[adapter_id] for adapter_id in sorted(reserved) if adapter_id in state.absent)
        yield from (state.groups[view.adapter_id] for view in self._policy.line(self._candidates, builder.now))
        if any(resident.users and not self._admission.can_work(resident) for resident in idle):
            # A parked adapter's unfinished answers may hold what they wait for: a row, KV, or the last place of a key.
            yield from (state.groups[view.adapter_id] for view in islice(state.absent.parked, LOOK_AHEAD))
        for group in self._candidates.at_hand():
            if not state.slots.empty and all(resident.users for resident in idle):
                break
            yield group

    def _leaver(self, idle: list[Group], successor: Group, is_reserved: bool) -> Group | None:
        """The idle resident that makes room for `successor`, if there is one."""
        unused = [group.adapter_id for group in idle if not group.users]
        if unused:
            return self._state.groups[self._state.slots.first_to_leave(unused)]
        can_work = self._admission.can_work
        if not can_work(successor):
            return None
        due_at = self._state.due_at(successor)
        later = [group for group in idle if is_reserved or group.oldest_at > due_at or not can_work(group)]
        return max(later, key=lambda group: (group.oldest_at, group.adapter_id), default=None)

    # ── busy slots ───────────────────────────────────────────────────────────────────────────────────────────────

    def _replace(self, builder: PlanBuilder) -> None:
        """Busy residents make room for the adapters that the policy prefers."""
        groups, candidates, now = self._state.groups, self._candidates, builder.now
        builder.ask_again(self._policy.ask_again_at(candidates, now))
        for turn in self._policy.turns(candidates, now)[: max(0, candidates.copies)]:
            leaver, successor = groups[turn.leaver], groups[turn.successor]
            assert candidates.may_leave(turn.leaver), "a policy took the slot of a resident that may not leave"
            assert turn.successor in self._state.absent, "a policy chose an adapter that has a slot or no work"
            assert candidates.is_at_hand(turn.successor), "a policy chose an adapter that is no claimant"
            self._mover.replace(builder, leaver, successor)
