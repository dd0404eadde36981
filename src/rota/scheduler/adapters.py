"""How adapters become known, arrive, are tried in a slot, fail and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

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
from rota.scheduler.reads import Fetching, IdleReads, finish_read, forget_copy
from rota.scheduler.slots import PageLedger
from rota.scheduler.state import SchedulerState
from rota.scheduler.turns import SlotCandidates, SlotMover, arrive, vacate
from rota.scheduler.version_moves import VersionMoves

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
    slots, left = state.slots, shared.open_with(group.adapter_id, count)
    if left >= slots.total:
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


# ── warm ups ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Warm-ups bring a new version of an adapter into a slot before its name means it.


class WarmUps:
    """A version gets an empty slot, or that of an adapter without requests, if no absent adapter could use it.

    Else its client is answered without one: no adapter waits longer for an update, but for the one copy that may be
    under way.
    """

    def __init__(self, state: SchedulerState, candidates: SlotCandidates, mover: SlotMover) -> None:
        self._state = state
        self._candidates = candidates
        self._mover = mover
        self._former: dict[AdapterId, AdapterId] = {}  # of versions that are being read or wait, whose place they take
        self._waiting: dict[AdapterId, Group] = {}  # they lie in host memory
        self._copied: AdapterId | None = None  # whose copy is under way

    def expect(self, group: Group, former: AdapterId) -> None:
        """A version is being read that will take the place of a former one."""
        self._former[group.adapter_id] = former

    def begin(self, group: Group) -> bool:
        """A version lies in host memory; False if no place was promised to it."""
        if group.adapter_id not in self._former or group.is_leaving:
            return False
        self._waiting[group.adapter_id] = group
        return True

    def forget(self, adapter_id: AdapterId) -> None:
        """A version has its place, or needs none."""
        self._former.pop(adapter_id, None)
        self._waiting.pop(adapter_id, None)
        if self._copied == adapter_id:
            self._copied = None

    def order(self, builder: PlanBuilder, answer: Callable[[Group, float], None]) -> None:
        """Once a pass, behind the turns. `answer` is called for versions that get no slot, or need no copy.

        One copy at a time, so that copies for requests wait for one at most.
        """
        while self._waiting and self._copied is None:
            group = next(iter(self._waiting.values()))
            self._move_in(builder, group)
            residency = self._state.slots.residencies.get(group.adapter_id)
            if residency is None or residency.is_ready:
                self.forget(group.adapter_id)
                answer(group, builder.now)
                builder.ask_again(
                    builder.now
                )  # the turns of this pass are over, and requests may wait for this version
            else:
                del self._waiting[group.adapter_id]
                self._copied = group.adapter_id

    def _move_in(self, builder: PlanBuilder, group: Group) -> None:
        state = self._state
        is_there = group.adapter_id in state.slots.residencies
        if is_there or group.is_leaving or not state.hosts.has(group.adapter_id):
            return
        unused = [one.adapter_id for one in self._candidates.idle() if not one.users]
        if state.slots.surplus or state.slots.empty + len(unused) <= len(state.absent):
            return
        if not state.slots.empty:
            former = self._former[group.adapter_id]
            leaver = former if former in unused else state.slots.first_to_leave(unused)
            vacate(state, state.groups[leaver], builder.now, SlotReason.IDLE)
        self._mover.move_in(builder, group, SlotReason.NEW_VERSION)


# ── adapter lifecycle ───────────────────────────────────────────────────────────────────────────────────────────────
# The adapter lifecycle says how adapters become known, arrive, fail and leave.


class AdapterLifecycle:
    """Every request to add or remove an adapter is answered by an event: added, refused or removed."""

    def __init__(
        self, state: SchedulerState, fetching: Fetching, idle_reads: IdleReads, warm_ups: WarmUps, policy: SlotPolicy
    ) -> None:
        self._state = state
        self._fetching = fetching
        self._idle_reads = idle_reads
        self._warm_ups = warm_ups
        self._policy = policy
        self._version_moves = VersionMoves(state)
        self._unanswered: set[AdapterId] = set()  # the clients that added them wait for an answer
        self._to_fetch: deque[Group] = deque()
        self._to_drop: list[AdapterId] = []

    def give_orders(self, builder: PlanBuilder) -> None:
        """Once a pass, before all else: reads and drops that were decided between two steps go out with the next."""
        self._state.hosts.begin_pass()
        builder.drops.extend(self._to_drop)
        self._to_drop = []
        # If there is no room for one new adapter, there is none for the others that are new.
        while self._to_fetch and self._fetch_if_new(builder, self._to_fetch[0]):
            self._to_fetch.popleft()

    def _fetch_if_new(self, builder: PlanBuilder, group: Group) -> bool:
        """Order the first read of an adapter, unless its requests had it read meanwhile; False if there is no room."""
        hosts, adapter_id = self._state.hosts, group.adapter_id
        is_new = self._state.groups.get(adapter_id) is group and adapter_id in self._unanswered
        return not is_new or hosts.is_fetching(adapter_id) or self._fetching.try_fetch(builder, group)

    def warm_up(self, builder: PlanBuilder) -> None:
        """Once a pass, behind the turns: new versions that were read come into slots that are free."""
        self._warm_ups.order(builder, self._answer)

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
        group = Group(adapter)
        self._state.groups[adapter.adapter_id] = group
        if group.is_pinned:
            self._state.pinned_groups[adapter.adapter_id] = group
        if message.is_read_later:
            self._know(group, at)
            self._idle_reads.expect(group)
        else:
            self._unanswered.add(adapter.adapter_id)
            self._to_fetch.append(group)
            if message.former is not None:
                self._warm_ups.expect(group, message.former)

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
        slots = self._state.slots.total
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
        self._idle_reads.forget(adapter_id)
        if not self._warm_ups.begin(group):
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
        if group.adapter_id in self._unanswered:
            self._unanswered.remove(group.adapter_id)
            self._state.outbox.append(AdapterAdded(group.adapter_id, at, self._state.engine_id))
        self._warm_ups.forget(group.adapter_id)
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
        if adapter_id in self._unanswered:
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
        self._warm_ups.forget(adapter_id)
        self._drop(adapter_id, at)
        if adapter_id in state.slots.residencies:
            vacate(state, group, at, SlotReason.FAILED, detail=reason)
        self._end_users(group, Fault(message.code, reason, "model"), at)
        is_new = self._is_lost(group, message.code)
        if is_new or adapter_id in self._unanswered:
            self._unanswered.discard(adapter_id)
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
        if group.standing is Standing.NEW or not self._idle_reads.has(group.adapter_id):
            return group.standing is Standing.NEW
        if code in PASSING:
            self._idle_reads.put_off(group.adapter_id)
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
        self._version_moves.apply(message)
        if group := self._state.groups.get(message.old):
            self.retire_if_done(group, message.at)

    def retire_if_done(self, group: Group, at: float) -> None:
        """Forget an adapter that is to leave, once no request uses it and no read or copy of it is under way."""
        state = self._state
        is_on_its_way = group.adapter_id in self._unanswered or state.hosts.is_fetching(group.adapter_id)
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
        self._idle_reads.forget(group.adapter_id)
        self._warm_ups.forget(group.adapter_id)
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
