"""How adapters become known, arrive, are tried in a slot, fail and leave."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from rota.core.adapter import Adapter, changed_since
from rota.core.errors import PASSING, Fault, FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, FinishReason, SlotReason
from rota.core.ids import BASE, AdapterId
from rota.core.messages import (
    AdapterFailed,
    AdapterFetched,
    AdapterMessage,
    AdapterReady,
    AddAdapter,
    MoveRequests,
    RemoveAdapter,
    SealAdapter,
    SlotsGrew,
)
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.adapter_state import Group, Standing
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.reads import Fetching, finish_read, forget_copy, order_read
from rota.scheduler.slots import PageLedger
from rota.scheduler.state import SchedulerState
from rota.scheduler.turns import SlotCandidates, SlotMover, arrive, vacate
from rota.scheduler.version_moves import move_requests

# ── page limits ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Page limits say which adapters are too large for the pages and the places of matrices that slots share.

_ADVICE = "start the server with a larger --lora-memory-share, or with this adapter among its --lora-paths"


def too_large(state: SchedulerState, group: Group, pages: int, matrices: int = 0) -> str:
    """Why an adapter that takes so many pages and matrices is refused; empty if it is not."""
    if group.adapter is None:
        return ""
    takes = f"Adapter '{group.adapter.name}' takes"
    shared = state.slots.pages
    reason = "" if shared is None else _too_many(state, group, shared, pages, f"{takes} {pages} pages of eight ranks")
    whole = f"{takes} {matrices} places for an embedding or a head of its own"
    return reason or (_too_many(state, group, state.slots.matrices, matrices, whole) if matrices else "")


def _too_many(state: SchedulerState, group: Group, shared: PageLedger, count: int, takes: str) -> str:
    """Beside pinned adapters one slot stays open, so that every other adapter can still get its turn."""
    slots, left = state.slots, shared.least_with(group.adapter_id, count)
    if left >= slots.least:
        return ""
    pinned = len(state.pinned)
    if not left:
        return f"{takes}, but the slots share {shared.total}; {_ADVICE}."
    if left > pinned:
        return ""
    return (
        f"{takes}: with it {left} of {slots.most} slots could be open, but {pinned + 1} must be, {pinned} of them for "
        f"pinned adapters; unload a pinned one, or {_ADVICE}."
    )


# ── arrivals ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Arrivals are one table: of adapters whose clients wait for an answer, and of those that are known and were never read.


class Coming(Enum):
    """What comes next for an adapter."""

    TO_READ = "its first read"
    BEING_READ = "the end of its first read"
    TO_COPY = "a slot, before the name of this new version means it"
    BEING_COPIED = "the end of its copy into that slot"
    # Requests may ask for these already.
    UNREAD = "a read as soon as nothing else is read"
    PUT_OFF = "a read for its first request: its source was away"


NEVER_READ = (Coming.UNREAD, Coming.PUT_OFF)


class AdapterArrivals:
    """The adapters of each stage, in the order in which they came to it."""

    def __init__(self) -> None:
        self._stages: dict[AdapterId, Coming] = {}
        self._lines: dict[Coming, dict[AdapterId, Group]] = {stage: {} for stage in Coming}

    def put(self, group: Group, stage: Coming) -> None:
        self.remove(group.adapter_id)
        self._stages[group.adapter_id] = stage
        self._lines[stage][group.adapter_id] = group

    def remove(self, adapter_id: AdapterId) -> None:
        """Nothing is to come for an adapter any more."""
        if stage := self._stages.pop(adapter_id, None):
            del self._lines[stage][adapter_id]

    def first(self, stage: Coming) -> Group | None:
        return next(iter(self._lines[stage].values()), None) if self._stages else None

    def was_never_read(self, adapter_id: AdapterId) -> bool:
        """Is it known, though it was never read?"""
        return self._stages.get(adapter_id) in NEVER_READ

    def is_unanswered(self, adapter_id: AdapterId) -> bool:
        """Does the client that added it wait for an answer?"""
        return adapter_id in self._stages and not self.was_never_read(adapter_id)


# ── adapter lifecycle ───────────────────────────────────────────────────────────────────────────────────────────────


class AdapterLifecycle:
    """Every request to add or remove an adapter is answered by an event: added, refused or removed."""

    def __init__(
        self,
        state: SchedulerState,
        fetching: Fetching,
        candidates: SlotCandidates,
        mover: SlotMover,
        policy: SlotPolicy,
    ) -> None:
        self._state = state
        self._fetching = fetching
        self._candidates = candidates
        self._mover = mover
        self._policy = policy
        self._arrivals = AdapterArrivals()
        self._to_drop: list[AdapterId] = []

    # ── what a pass orders ───────────────────────────────────────────────────────────────────────────────────────────

    def give_orders(self, builder: PlanBuilder) -> None:
        """Once a pass, before all else: reads and drops that were decided between two steps go out with the next."""
        hosts = self._state.hosts
        hosts.begin_pass()
        builder.drops.extend(self._to_drop)
        self._to_drop = []
        while group := self._arrivals.first(Coming.TO_READ):
            # Its requests may have had it read meanwhile.
            if not hosts.is_fetching(group.adapter_id) and not self._fetching.try_fetch(builder, group):
                return  # if there is no room for one new adapter, there is none for the others that are new
            self._arrivals.put(group, Coming.BEING_READ)

    def go_on(self, builder: PlanBuilder) -> None:
        """Once a pass, behind the turns: what no request waits for."""
        self._warm_up(builder)
        self._read_idly(builder)

    def _warm_up(self, builder: PlanBuilder) -> None:
        """New versions that were read come into slots that are free; those that get none are answered without one.

        One copy at a time, so that copies for requests wait for one at most.
        """
        arrivals = self._arrivals
        while (group := arrivals.first(Coming.TO_COPY)) and not arrivals.first(Coming.BEING_COPIED):
            self._move_in(builder, group)
            residency = self._state.slots.residencies.get(group.adapter_id)
            if residency is None or residency.is_ready:
                self._answer(group, builder.now)
                # The turns of this pass are over, and requests may wait for this version.
                builder.ask_again(builder.now)
            else:
                arrivals.put(group, Coming.BEING_COPIED)

    def _move_in(self, builder: PlanBuilder, group: Group) -> None:
        """A version gets an empty slot, or that of an adapter without requests, if no absent adapter could use it."""
        state = self._state
        is_there = group.adapter_id in state.slots.residencies
        if is_there or group.is_leaving or not state.hosts.has(group.adapter_id):
            return
        unused = [one.adapter_id for one in self._candidates.idle() if not one.users]
        state.slots.want(group.adapter_id)  # only if it is counted there is room for it
        if state.slots.surplus or state.slots.empty + len(unused) <= len(state.absent):
            state.note_users(group)
            return
        if not state.slots.empty:
            leaver = group.former if group.former in unused else state.slots.first_to_leave(unused)
            vacate(state, state.groups[leaver], builder.now, SlotReason.IDLE)
        self._mover.move_in(builder, group, SlotReason.NEW_VERSION)

    def _read_idly(self, builder: PlanBuilder) -> None:
        """Read an adapter that no request has asked for, while no other is read, and only into room that is free.

        No adapter leaves host memory for it, and the disk is free for the adapters of requests, but for one read.
        """
        group, hosts = self._arrivals.first(Coming.UNREAD), self._state.hosts
        if group and group.adapter and not hosts.reads and not hosts.is_full:
            order_read(self._state, builder, group.adapter, is_idle=True)

    # ── what happened ────────────────────────────────────────────────────────────────────────────────────────────────

    def apply(self, message: AdapterMessage) -> None:
        match message:
            case AddAdapter():
                self._add(message)
            case RemoveAdapter():
                self._remove(message)
            case MoveRequests():
                self._move(message)
            case SealAdapter():
                self._seal(message)
            case AdapterFetched():
                self._fetched(message)
            case AdapterReady(adapter_id, at, copy_s):
                self._state.note_copy(adapter_id, copy_s)
                self._ready(adapter_id, at)
            case AdapterFailed():
                self._failed(message)
            case SlotsGrew(size_bytes):
                self._state.slot_bytes = size_bytes

    def _add(self, message: AddAdapter) -> None:
        adapter, at = message.adapter, message.at
        if reason := message.refusal or self._reason_against(adapter):
            self._refuse(adapter.adapter_id, at, reason, message.refusal_code)
            return
        group = Group(adapter, self._state.lengths, message.former)
        self._state.groups[adapter.adapter_id] = group
        if group.is_pinned:
            self._state.pinned_groups[adapter.adapter_id] = group
        if message.is_read_later:
            self._know(group, at)
            self._arrivals.put(group, Coming.UNREAD)
        else:
            self._arrivals.put(group, Coming.TO_READ)

    def _know(self, group: Group, at: float) -> None:
        """Requests may ask for an adapter from now on."""
        group.standing = Standing.KNOWN
        self._state.note_users(group)
        self._state.outbox.append(AdapterAdded(group.adapter_id, at, self._state.engine_id))

    def _refuse(
        self, adapter_id: AdapterId, at: float, reason: str, code: FaultCode = FaultCode.ADAPTER_FAILED
    ) -> None:
        self._state.outbox.append(
            AdapterRefused(adapter_id=adapter_id, at=at, reason=reason, engine_id=self._state.engine_id, code=code)
        )

    def _reason_against(self, adapter: Adapter) -> str | None:
        slots = self._state.slots.least
        if adapter.adapter_id in self._state.groups:
            return f"An adapter with the id {adapter.adapter_id} is already known."
        if slots == 0:
            return "This server was started without adapter slots."
        if adapter.is_pinned and len(self._state.pinned - {adapter.name}) >= slots - 1:
            kind = "slots" if slots == self._state.slots.most else "open slots"
            return (
                f"Adapter '{adapter.name}' cannot be pinned: of {slots} {kind} at most {slots - 1} may be pinned, "
                f"so that every other adapter can still get its turn."
            )
        return None

    def _fetched(self, message: AdapterFetched) -> None:
        adapter_id, at = message.adapter_id, message.at
        group = self._state.groups[adapter_id]
        finish_read(self._state, message)
        self._state.note_users(group)
        assert group.adapter is not None, "the base model is never read"
        if not group.adapter.seals:
            group.adapter = replace(group.adapter, seals=message.seals)
        elif message.seals != group.adapter.seals:  # another engine has read it first, while this one read it
            reason, code = changed_since(group.adapter), FaultCode.ADAPTER_CHANGED
            self._failed(AdapterFailed(adapter_id=adapter_id, at=at, reason=reason, code=code))
            return
        if reason := too_large(self._state, group, message.pages, message.matrices):
            self._failed(AdapterFailed(adapter_id=adapter_id, at=at, reason=reason))
            return
        self._state.slots.know(adapter_id, message.pages, message.matrices)
        if group.former is not None and self._arrivals.is_unanswered(adapter_id) and not group.is_leaving:
            self._arrivals.put(group, Coming.TO_COPY)
        else:
            self._answer(group, at)

    def _seal(self, message: SealAdapter) -> None:
        """What another engine has read is the version, and what this one has read must be the same."""
        group = self._state.groups.get(message.adapter_id)
        if group is None or group.adapter is None:
            return
        own, group.adapter = group.adapter.seals, replace(group.adapter, seals=message.seals)
        if own and own != message.seals:
            fault = Fault(FaultCode.ADAPTER_CHANGED, changed_since(group.adapter), "model")
            self._remove(RemoveAdapter(adapter_id=group.adapter_id, at=message.at, is_forced=True, fault=fault))

    def _answer(self, group: Group, at: float) -> None:
        """An adapter was read, and lies in a slot if one was free for it: its adder is told."""
        if self._arrivals.is_unanswered(group.adapter_id):
            self._state.outbox.append(AdapterAdded(group.adapter_id, at, self._state.engine_id))
        self._arrivals.remove(group.adapter_id)
        if not group.is_leaving:
            group.standing = Standing.KNOWN
        self._state.note_users(group)
        self.retire_if_done(group, at)

    def _ready(self, adapter_id: AdapterId, at: float) -> None:
        group = self._state.groups.get(adapter_id)
        if group is None:
            return  # it counted as arrived before, and has been removed since
        residency = self._state.slots.residencies.get(adapter_id)
        if residency is not None and not residency.is_ready:
            arrive(self._state, adapter_id, at)
        if self._arrivals.is_unanswered(adapter_id):
            self._answer(group, at)
        else:
            self.retire_if_done(group, at)

    def _failed(self, message: AdapterFailed) -> None:
        """End the adapter's requests with the reason, and free what the adapter held; nothing else changes."""
        state = self._state
        adapter_id, at, reason = message.adapter_id, message.at, message.reason
        group = state.groups.get(adapter_id)
        if group is None:
            return  # a step waited for this copy, and the adapter has been removed since
        self._drop(adapter_id, at)
        if adapter_id in state.slots.residencies:
            vacate(state, group, at, SlotReason.FAILED, detail=reason)
        self._end_users(group, Fault(message.code, reason, "model"), at)
        is_new = self._is_lost(group, message.code)
        if is_new or self._arrivals.is_unanswered(adapter_id):
            self._arrivals.remove(adapter_id)
            self._refuse(adapter_id, at, reason, message.code)
        if is_new:
            self._forget(group)
        elif group.standing is Standing.KNOWN:
            group.standing = Standing.FAILED  # or a pinned adapter would be read and fail for ever
            state.note_users(group)
        self.retire_if_done(group, at)

    def _is_lost(self, group: Group, code: FaultCode) -> bool:
        """What was never read is not known, also if requests could ask for it; the next read may succeed.

        Nor is a version whose files are others by now: no engine can read it again.
        """
        if code is FaultCode.ADAPTER_CHANGED:
            return not group.is_leaving
        if not self._arrivals.was_never_read(group.adapter_id):
            return group.standing is Standing.NEW
        if code in PASSING:
            self._arrivals.put(group, Coming.PUT_OFF)
            return False
        return group.standing in (Standing.KNOWN, Standing.FAILED)

    def _remove(self, message: RemoveAdapter) -> None:
        """Unload: waits for the adapter's requests unless forced, and for a copy under way in any case."""
        adapter_id, at = message.adapter_id, message.at
        group = self._state.groups.get(adapter_id)
        if group is None or adapter_id == BASE:
            self._refuse(adapter_id, at, f"No adapter with the id {adapter_id} is known.")
            return
        group.standing = Standing.RETIRING if message.takes_requests else Standing.LEAVING
        self._unpin(group)  # the next version of the name may be pinned in its place
        self._state.note_users(group)
        if message.is_forced:
            name = group.adapter.name if group.adapter else ""
            unloaded = Fault(FaultCode.ADAPTER_FAILED, f"Adapter '{name}' was unloaded.", "model")
            self._end_users(group, message.fault or unloaded, at)
        self.retire_if_done(group, at)

    def _move(self, message: MoveRequests) -> None:
        move_requests(self._state, message)
        if group := self._state.groups.get(message.old):
            self.retire_if_done(group, message.at)

    def retire_if_done(self, group: Group, at: float) -> None:
        """Forget an adapter that is to leave, once no request uses it and no read or copy of it is under way."""
        state = self._state
        is_on_its_way = self._arrivals.is_unanswered(group.adapter_id) or state.hosts.is_fetching(group.adapter_id)
        if not group.is_leaving or group.users or is_on_its_way:
            return
        residency = state.slots.residencies.get(group.adapter_id)
        if residency:
            if not residency.is_ready:
                return
            vacate(state, group, at, SlotReason.UNLOADED)
        self._drop(group.adapter_id, at)
        self._forget(group)
        state.outbox.append(AdapterRemoved(group.adapter_id, at, state.engine_id))

    def _unpin(self, group: Group) -> None:
        group.is_pinned = False
        self._state.pinned_groups.pop(group.adapter_id, None)

    def _forget(self, group: Group) -> None:
        self._unpin(group)
        del self._state.groups[group.adapter_id]
        self._state.slots.forget(group.adapter_id)
        self._state.absent.remove(group)
        self._arrivals.remove(group.adapter_id)
        self._policy.forget(group.adapter_id)

    def _drop(self, adapter_id: AdapterId, at: float) -> None:
        """The adapter is not in host memory, and not on its way there, from the next step on."""
        if self._state.hosts.has(adapter_id):
            self._to_drop.append(adapter_id)
        forget_copy(self._state, adapter_id, at)
        if group := self._state.groups.get(adapter_id):
            self._state.note_users(group)

    def _end_users(self, group: Group, fault: Fault, at: float) -> None:
        for sequence in [*group.queue, *group.running_sequences()]:
            self._state.finish(sequence, FinishReason.FAILED, at, fault)
