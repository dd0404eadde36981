"""Standings say why a request waits and how every adapter stands; a standstill is noticed in the pass."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from rota.core.events import AdapterStanding, Explained, Inspected, Whereabouts
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.standstill import STANDSTILL_S, StoodStill, WentOn
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.adapter_state import Group
from rota.scheduler.plan_builder import InFlightStep, PlanBuilder
from rota.scheduler.queues import by_turn
from rota.scheduler.sequence import Phase, Reason, Refusal, Sequence
from rota.scheduler.state import SchedulerState
from rota.scheduler.turns import SlotCandidates

# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Counting tells how many requests wait and run, of some adapters one by one and of all others in sum.

Summed = tuple[tuple[AdapterStanding, ...], AdapterStanding | None, tuple[AdapterId, ...]]


def counted(state: SchedulerState, group: Group) -> AdapterStanding:
    """The requests of one adapter, without the reason why the first of them waits."""
    first = group.queue.first()
    running = group.rows if state.is_open(group) else 0
    return AdapterStanding(
        adapter_id=group.adapter_id,
        waiting=group.waiting,
        running=running,
        parked=group.running - running,
        oldest_at=first.request.arrived_at if first else None,
        reason="",
    )


def summed(state: SchedulerState, only: Collection[AdapterId]) -> Summed:
    """The adapters of `only` and the base model, all others in sum, and the adapters that have work and no slot.

    Walks through the residents and `only`, and never through all adapters.
    """
    groups = [state.base, *(group for one in only if one != BASE and (group := state.groups.get(one)))]
    told = tuple(counted(state, group) for group in groups)
    running = sum(group.rows for group in state.open_groups) - sum(one.running for one in told)
    holding = state.running_count - sum(one.running + one.parked for one in told)
    others = AdapterStanding(
        adapter_id=BASE,
        waiting=state.waiting - sum(one.waiting for one in told),
        running=running,
        parked=holding - running,
        oldest_at=_oldest_at(state, {one.adapter_id for one in told}),
        reason="",
    )
    return told, others, tuple(group.adapter_id for group in state.absent)


def _oldest_at(state: SchedulerState, told: Collection[AdapterId]) -> float | None:
    """Since when a request of another adapter waits."""
    rest = (group.queue.first() for group in state.open_groups if group.adapter_id not in told)
    found = [first.request.arrived_at for first in rest if first]
    for group in state.absent.oldest:
        if group.adapter_id not in told and (first := group.queue.first()):
            found.append(first.request.arrived_at)
            break
    return min(found, default=None)


# ── standing ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Standings read from the state why a request waits and how every adapter stands, and change nothing.


def refusal_of(state: SchedulerState, request_id: RequestId) -> Refusal | None:
    """Why a request waits, since when, and when to ask again; None if it does not wait."""
    sequence = state.sequences.get(request_id)
    return _refusal(state, sequence) if sequence and sequence.phase is Phase.WAITING else None


class Standings:
    """Answers the queries of clients and operators."""

    def __init__(self, state: SchedulerState, candidates: SlotCandidates, policy: SlotPolicy) -> None:
        self._state = state
        self._candidates = candidates
        self._policy = policy

    def explained(self, request_id: RequestId, at: float) -> Explained:
        """Walks through the adapter's queue: meant for the one request that a client asks about, not for all."""
        state = self._state
        sequence = state.sequences.get(request_id)
        if sequence is None:
            return Explained(request_id=request_id, at=at, state=Whereabouts.UNKNOWN)
        group = state.group_of(sequence)
        whereabouts, refusal, position = Whereabouts.PARKED, _why_parked(state, sequence), 0
        if sequence.phase is Phase.WAITING:
            whereabouts, refusal = Whereabouts.WAITING, _refusal(state, sequence)
            before = (one for one in group.queue if one.account is sequence.account)
            position = sum(by_turn(one) < by_turn(sequence) for one in before)
        if refusal is None:
            return Explained(request_id=request_id, at=at, state=Whereabouts.RUNNING)
        return Explained(
            request_id=request_id,
            at=at,
            state=whereabouts,
            reason=refusal.reason,
            since=refusal.since,
            position=position,
            # Between tenants, how many others wait is their own affair.
            outlook=self._outlook(group, is_counted=not state.accounts.are_shared),
        )

    def inspected(self, steps: int, at: float, only: Collection[AdapterId] | None = None) -> Inspected:
        state = self._state
        used, pages = state.blocks.total - state.blocks.free, state.slots.pages
        told, others, absent = self._all() if only is None else summed(state, only)
        return Inspected(
            at=at,
            steps=steps,
            rows=state.rows.total - state.rows.free,
            blocks=state.blocks.total,
            blocks_used=used,
            slots=state.slots.total,
            adapters=told,
            engine_id=state.engine_id,
            pages=pages.total if pages else 0,
            pages_used=pages.used if pages else 0,
            slot_bytes=state.slot_bytes,
            promisable_s=self._policy.promisable_s(self._candidates),
            others=others,
            absent=absent,
        )

    def _all(self) -> Summed:
        return tuple(map(self._standing, filter(self._is_in_use, self._state.groups.values()))), None, ()

    def _is_in_use(self, group: Group) -> bool:
        return bool(group.users) or group is self._state.base

    def _standing(self, group: Group) -> AdapterStanding:
        first = group.queue.first()
        reason = _refusal(self._state, first).reason if first else ""
        return replace(counted(self._state, group), reason=reason, outlook=self._outlook(group))

    def _outlook(self, group: Group, is_counted: bool = True) -> str:
        if group.adapter_id not in self._state.absent:
            return ""
        return self._policy.outlook(group, self._candidates).sentence(is_counted)


def _refusal(state: SchedulerState, sequence: Sequence) -> Refusal:
    if state.paused_at is not None:
        return Refusal(Reason.PAUSED.value, max(state.paused_at, sequence.request.arrived_at))
    if not state.is_open(state.group_of(sequence)):
        return Refusal(Reason.NOT_IN_SLOT.value, sequence.request.arrived_at)
    return sequence.refusal or Refusal("others of its adapter came first", sequence.request.arrived_at)


def _why_parked(state: SchedulerState, sequence: Sequence) -> Refusal | None:
    """Why a sequence that holds KV is not in the next step; None if it runs."""
    group = state.group_of(sequence)
    if state.paused_at is not None:
        return Refusal(Reason.PAUSED.value, state.paused_at)
    if not state.is_open(group):
        return Refusal(Reason.NOT_IN_SLOT.value, group.ran_at)
    return sequence.refusal if sequence.row is None else None


# ── standstills ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Standstills are noticed in the pass: requests are open, and no step has computed anything for long.
#
# A standstill that lasts is told of again each time it has lasted twice as long. A standstill is stuck if nothing is
# under way that the scheduler will be told of, and if no moment will change its answers: then it asks for no pass more.

# An event has the reasons of so many requests at most.
MOST_REASONS = 20


class Standstills:
    """Costs a few comparisons a pass while steps run."""

    def __init__(self, state: SchedulerState, standings: Standings, limit_s: float = STANDSTILL_S) -> None:
        self._state = state
        self._standings = standings
        self._limit_s = limit_s
        self.forget()

    def forget(self) -> None:
        """Nothing stands still."""
        self._since = math.inf  # the first pass of this standstill
        self._due_at = math.inf  # when it is told, or told again
        self._told = ""  # the kind that was told last

    def note(self, builder: PlanBuilder, steps_in_flight: Collection[InFlightStep]) -> None:
        """At the end of every pass; `steps_in_flight` are the steps before this one that have not ended."""
        state, now = self._state, builder.now
        is_paused, computes = state.paused_at is not None, builder.chunks or builder.decodes
        if computes or is_paused or not state.sequences or any(one.chunks or one.decodes for one in steps_in_flight):
            self._end(now)
            return
        if self._since == math.inf:
            self._since, self._due_at = now, now + self._limit_s
        waits_for = self._waits_for(builder, steps_in_flight)
        has_stuck = self._told == "waiting" and not waits_for
        if now >= self._due_at or has_stuck:
            self._tell(now, waits_for)
        if waits_for or not self._told:
            builder.ask_again(self._due_at)

    def _end(self, now: float) -> None:
        if self._told:
            self._state.outbox.append(WentOn(now, now - self._since, self._state.engine_id))
        self.forget()

    def _waits_for(self, builder: PlanBuilder, steps_in_flight: Collection[InFlightStep]) -> str:
        """What will bring another pass, without a message from outside."""
        reads, copies = self._state.hosts.reads, len(self._state.slots.on_their_way)
        under_way = {
            f"reads of adapters ({reads})": reads,
            f"copies into slots ({copies})": copies,
            "adapters that leave": builder.drops or steps_in_flight,
            f"a delay of {max(0.0, builder.wake_at - builder.now):.1f} s": builder.wake_at < math.inf,
        }
        return ", ".join(words for words, is_so in under_way.items() if is_so)

    def _tell(self, now: float, waits_for: str) -> None:
        sequences = self._state.sequences
        explained = [self._standings.explained(one, now) for one in islice(sequences, MOST_REASONS)]
        reasons = [(one.request_id, one.reason or "it could run, and no step has it") for one in explained]
        event = StoodStill(
            at=now,
            since=self._since,
            requests=len(sequences),
            reasons=tuple(reasons),
            waits_for=waits_for,
            engine_id=self._state.engine_id,
            is_news=self._told != ("waiting" if waits_for else "stuck"),
        )
        self._state.outbox.append(event)
        self._told, self._due_at = event.kind, now + event.still_s
