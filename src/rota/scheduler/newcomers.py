"""Newcomers start by arrival while the step has room; every refusal has a reason, and every reason an effect."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from operator import itemgetter

from rota.core.events import Admitted
from rota.core.plan import Seat
from rota.policy.prefill_delayer import DelayVerdict
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import Group
from rota.scheduler.admission import LOOK_AHEAD, Admission, Delays, Head, Offer
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.preemption import Sharing
from rota.scheduler.prefill import PrefillSharing
from rota.scheduler.queues import Place
from rota.scheduler.sequence import EFFECT_AFTER_SKIPS, EFFECT_OF, Arrival, Effect, Phase, Reason, Refusal, Sequence
from rota.scheduler.state import SchedulerState
from rota.scheduler.version_moves import tell_move

# ── seating ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Seating gives rows to sequences that hold KV and whose adapter is in a slot, but whose row was taken meanwhile.


def sit_down(state: SchedulerState, sharing: Sharing, builder: PlanBuilder) -> None:
    """Before decodes are planned: these sequences decode in the same step, and nothing is computed anew."""
    if state.running_count == state.rows.total - state.rows.free:
        return  # every sequence that holds KV has a row
    spare = max(0, state.rows.available - len(builder.invited))
    lines = [_rowless(group, spare + 1) for group in state.open_groups if group.rowless]
    for _, _, sequence in heapq.merge(*lines):
        # Another tenant may hold more than its share of the rows.
        if spare <= 0 and not (state.accounts.are_shared and sharing.make_row(builder, sequence)):
            return
        spare -= 1
        _sit(state, builder, sequence)


def _rowless(group: Group, most: int) -> list[tuple[float, Arrival, Sequence]]:
    """An adapter's first sequences without a row. While a step is in flight, the newest token is not known yet."""
    ready = (one for one in group.rowless if not one.steps_in_flight)
    return [(one.account.rank, one.arrival, one) for one in islice(ready, most)]


def _sit(state: SchedulerState, builder: PlanBuilder, sequence: Sequence) -> None:
    group = state.group_of(sequence)
    group.part(sequence)
    state.take_row(sequence)
    group.join(sequence, sequence.phase)
    sequence.refusal = None
    tell_move(state, sequence, builder.now)
    builder.seats.append(seat_of(sequence))


def seat_of(sequence: Sequence) -> Seat:
    assert sequence.row is not None
    return Seat(
        request_id=sequence.request_id,
        row=sequence.row,
        adapter_id=sequence.request.adapter_id,
        # A prompt of 32,000 tokens takes half a millisecond to copy.
        tokens=tuple(sequence.tokens) if sequence.output_length else sequence.request.prompt,
        prompt_length=sequence.prompt_length,
        blocks=tuple(sequence.blocks),
        sampling=sequence.request.sampling,
        computed=sequence.computed,
    )


# How often a request that waits for KV may be overtaken.
MOST_OVERTAKES = 64
# How many sequences of all tenants a pass skips for the same reason.
MOST_SKIPS = 4 * LOOK_AHEAD


@dataclass(slots=True, kw_only=True)
class Pass:
    """The state of one pass over the queues."""

    builder: PlanBuilder
    delay: DelayVerdict | None
    heads: list[Head]  # a heap, by the rank of the tenant and then by arrival
    is_shared: bool  # have several tenants open requests?
    # Sequences that the next ones in their queue may overtake; they go back into their queue after the pass.
    skipped: defaultdict[Reason, list[Sequence]] = field(default_factory=lambda: defaultdict(list))
    # Sequences that are due a slot and lack KV too; looked up when a sequence is about to take KV.
    line_for_both: list[Sequence] | None = None
    admitted: list[Sequence] = field(default_factory=list)
    held_s: float = 0.0  # the longest time that a delay has held back an admitted sequence
    why_others_wait: Reason = Reason.STEP_FULL
    # Tenants of which no other sequence starts, and why.
    stopped: dict[Account, Reason] = field(default_factory=dict)
    # Places of tenants that others in the same adapter's queue may overtake; they go back into it after the pass.
    passed_over: list[tuple[Group, Place]] = field(default_factory=list)
    _latest: list[tuple[Arrival, Account]] | None = None

    def latest_admitted(self) -> list[tuple[Arrival, Account]]:
        """The latest arrivals of two tenants among those admitted: for any tenant, one of the two is another."""
        if self._latest is None:
            latest: dict[Account, Arrival] = {}
            for one in self.admitted:
                latest[one.account] = max(one.arrival, latest.get(one.account, one.arrival))
            self._latest = nlargest(2, ((arrival, account) for account, arrival in latest.items()), key=itemgetter(0))
        return self._latest

    def add_head(self, group: Group) -> None:
        if head := head_of(group, self.builder, self.is_shared):
            heapq.heappush(self.heads, head)

    def pass_over_tenant(self, group: Group) -> None:
        self.passed_over.append((group, group.queue.pass_over()))
        self.add_head(group)


class Newcomers:
    """Gives rows to waiting sequences; a sequence that cannot start does not stop those of other adapters."""

    def __init__(
        self,
        state: SchedulerState,
        admission: Admission,
        delays: Delays,
        prompts: PrefillSharing,
        most_prompts: int | None = None,
    ) -> None:
        """`most_prompts` bounds the prompts of a step, those that have begun included; None: no bound."""
        self._most_prompts = math.inf if most_prompts is None else most_prompts
        self._state = state
        self._admission = admission
        self._delays = delays
        self._prompts = prompts

    def admit(self, builder: PlanBuilder) -> None:
        is_shared = self._state.accounts.are_shared
        heads = self._heads(builder, is_shared)
        delay = self._delays.ask(builder, heads)
        self._state.line_ends_at = {}
        if not heads:
            return
        current = Pass(builder=builder, delay=delay, heads=heads, is_shared=is_shared)
        self._admit_invited(current)
        if builder.budget > 0 and not self._state.rows.available:
            current.why_others_wait = Reason.NO_ROW  # whatever else the sequences lack
        else:
            self._admit_heads(current)
        self._refuse_the_rest(current)
        self._delays.note_admitted(len(current.admitted))

    def _admit_invited(self, current: Pass) -> None:
        """Sequences for which other tenants made room go first."""
        for sequence in current.builder.invited:
            group = self._state.group_of(sequence)
            verdict = self._consider(current, sequence, group, is_invited=True)
            if isinstance(verdict, Offer) and self._has_room(current.builder):
                self._start(current, sequence, group, verdict)
        if current.admitted:
            self._look_again(current)

    def _has_room(self, builder: PlanBuilder) -> bool:
        return builder.budget > 0 and len(builder.portions) < self._most_prompts

    def _look_again(self, current: Pass) -> None:
        """Which sequences are next has changed in every queue."""
        current.heads = self._heads(current.builder, current.is_shared)
        heapq.heapify(current.heads)

    def _heads(self, builder: PlanBuilder, is_shared: bool) -> list[Head]:
        groups = [group for group in self._state.open_groups if group.users > group.running]
        return [head for group in groups if (head := head_of(group, builder, is_shared))]

    def _admit_heads(self, current: Pass) -> None:
        builder = current.builder
        heapq.heapify(current.heads)
        while current.heads and self._has_room(builder):
            rank, _, sequence, group = heapq.heappop(current.heads)
            if current.is_shared and sequence.account.rank > rank:  # its tenant has got something meanwhile
                current.add_head(group)
            elif sequence.account in current.stopped:
                self._refuse(current, sequence, current.stopped[sequence.account])
                current.pass_over_tenant(group)
            elif (backlog := builder.backlogs.get(sequence.account)) and not backlog.split.lets_in(sequence):
                self._refuse(current, group.queue.next() or sequence, Reason.STEP_FULL)
                current.pass_over_tenant(group)
            elif isinstance(verdict := self._consider(current, sequence, group), Offer):
                if self._start(current, sequence, group, verdict):
                    self._look_again(current)
                else:
                    current.add_head(group)
            elif not self._goes_on(current, sequence, group, verdict):
                return

    def _goes_on(self, current: Pass, sequence: Sequence, group: Group, reason: Reason) -> bool:
        """Refuse a sequence; False if no other sequence starts in this pass."""
        self._refuse(current, sequence, reason)
        match self._effect_of(reason, sequence, current):
            case Effect.STOP:
                current.why_others_wait = Reason.IN_LINE
                return False
            case Effect.STOP_TENANT:
                self._stop_tenant(current, sequence, reason)
                current.pass_over_tenant(group)
                return len(current.stopped) <= LOOK_AHEAD
            case Effect.SKIP_TENANT:
                current.pass_over_tenant(group)
            case Effect.SKIP_ONE:
                group.queue.remove(sequence)
                current.skipped[reason].append(sequence)
                current.add_head(group)
        return True

    def _consider(self, current: Pass, sequence: Sequence, group: Group, is_invited: bool = False) -> Offer | Reason:
        verdict = self._admission.consider(sequence, group, current.delay, is_invited)
        if isinstance(verdict, Offer):
            if current.line_for_both is None:
                current.line_for_both = self._line_for_both()
            if _not_to_be_overtaken(current.line_for_both, sequence):
                return Reason.IN_LINE
        return verdict

    def _effect_of(self, reason: Reason, sequence: Sequence, current: Pass) -> Effect:
        effect = EFFECT_OF[reason]
        if effect is not Effect.SKIP_ONE:
            return effect
        is_overtaken_enough = reason is Reason.NO_KV and sequence.overtaken >= MOST_OVERTAKES
        if is_overtaken_enough and self._state.accounts.are_shared and not sequence.account.seats:
            return Effect.STOP  # a tenant that runs nothing would starve if other tenants went on to take KV
        skipped = current.skipped[reason]
        if is_overtaken_enough or sum(one.account is sequence.account for one in skipped) == LOOK_AHEAD:
            return EFFECT_AFTER_SKIPS[reason]
        if len(skipped) >= MOST_SKIPS:  # of many tenants
            return Effect.STOP if reason is Reason.NO_KV else EFFECT_AFTER_SKIPS[reason]
        return Effect.SKIP_ONE

    def _stop_tenant(self, current: Pass, sequence: Sequence, reason: Reason) -> None:
        """No other sequence of this tenant starts; behind a sequence that waits for KV, later ones stand in line."""
        account, line = sequence.account, self._state.line_ends_at
        current.stopped[account] = reason if reason is Reason.TENANT_FULL else Reason.IN_LINE
        if reason is Reason.IN_LINE:
            line[account.name] = min(_not_to_be_overtaken(current.line_for_both or [], sequence))
        elif reason is Reason.NO_KV:
            line[account.name] = sequence.arrival

    def _line_for_both(self) -> list[Sequence]:
        """Sequences that are next due a slot and lack KV too; their overtakes are counted, as they get no slot."""
        firsts = [group.queue.first() for group in islice(self._state.absent, LOOK_AHEAD)]
        return [first for first in firsts if first and self._admission.lacks_kv(first)]

    # ── sequences that start ─────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, current: Pass, sequence: Sequence, group: Group, offer: Offer) -> bool:
        """Let a sequence start; True if it is so long that from now on only short ones may start beside it."""
        self._sit_down(current.builder, sequence, group, offer)
        is_long = self._prompts.start(current.builder, sequence)
        current.admitted.append(sequence)
        current.held_s = max(current.held_s, sequence.held_s)
        for other in (*current.skipped[Reason.NO_KV], *(current.line_for_both or [])):
            other.overtaken += other.arrival < sequence.arrival
        return is_long

    def _sit_down(self, builder: PlanBuilder, sequence: Sequence, group: Group, offer: Offer) -> None:
        blocks = self._state.blocks
        self._state.dequeue(sequence)
        blocks.hold(offer.cached)
        sequence.blocks = offer.cached + blocks.allocate(offer.fresh)
        sequence.room = len(sequence.blocks) * blocks.block_size
        self._state.take_seat(sequence)
        self._state.take_row(sequence)
        cached_tokens = len(offer.cached) * blocks.block_size
        sequence.computed = sequence.planned = cached_tokens
        sequence.next_full = cached_tokens + blocks.block_size
        reasons = _reasons(sequence, group)
        sequence.refusal = None
        sequence.overtaken = 0
        if not sequence.output_length:
            sequence.cached_tokens = cached_tokens
        group.join(sequence, Phase.PREFILL)
        self._state.outbox.append(
            Admitted(request_id=sequence.request_id, at=builder.now, cached_tokens=cached_tokens, reasons=reasons)
        )
        tell_move(self._state, sequence, builder.now)
        builder.seats.append(seat_of(sequence))

    # ── sequences that wait ──────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, current: Pass, sequence: Sequence, reason: Reason) -> None:
        last, delay = sequence.refusal, current.delay
        ask_again_at = delay.ask_again_at if delay and reason is Reason.DELAYED else math.inf
        if last and last.reason == reason and last.ask_again_at == ask_again_at:
            return  # as in the last pass; mostly this goes on for hundreds of passes
        since = last.since if last and last.reason == reason else current.builder.now
        sequence.refusal = Refusal(reason, since, ask_again_at)

    def _refuse_the_rest(self, current: Pass) -> None:
        for _, _, first, _ in current.heads:
            self._refuse(current, first, self._why_it_waits(current, first))
            if current.why_others_wait is Reason.STEP_FULL:
                # It could have started beside the delayed sequences that fill the step now: so it was delayed too.
                waited_s = current.builder.now - first.request.arrived_at
                first.held_s = max(first.held_s, min(current.held_s, waited_s))
        for reason in EFFECT_AFTER_SKIPS if current.skipped else ():
            for sequence in current.skipped[reason]:
                self._state.group_of(sequence).queue.push(sequence)
        for group, place in current.passed_over:
            group.queue.give_back(place)

    def _why_it_waits(self, current: Pass, first: Sequence) -> Reason:
        """The reason of a sequence that was not looked at in this pass."""
        account, accounts = first.account, self._state.accounts
        if account in current.stopped:
            return current.stopped[account]
        if not accounts.are_shared:
            return current.why_others_wait
        if current.why_others_wait is Reason.NO_ROW:
            is_others_turn = account.rows >= accounts.share(account, self._state.rows.total)
        else:
            is_others_turn = any(
                one is not account and arrival > first.arrival for arrival, one in current.latest_admitted()
            )
        return Reason.OTHER_TENANT if is_others_turn else current.why_others_wait


def head_of(group: Group, builder: PlanBuilder, is_shared: bool) -> Head | None:
    """The sequence of an adapter's queue that would start next; beside prompts that fill the step, the shortest.

    A tenant that is alone needs no rank.
    """
    first = group.queue.next()
    if first and first.account in builder.backlogs:
        first = group.queue.shortest_of(first.account)
    return (first.account.rank if is_shared else 0.0, first.turn, first, group) if first else None


def _not_to_be_overtaken(line: list[Sequence], sequence: Sequence) -> list[Arrival]:
    """Arrivals of sequences of the same tenant in line that came before `sequence` and were overtaken often enough."""
    own = (one for one in line if one.account is sequence.account)
    return [one.arrival for one in own if one.overtaken >= MOST_OVERTAKES and one.arrival < sequence.arrival]


def _reasons(sequence: Sequence, group: Group) -> tuple[str, ...]:
    """What a sequence that may start now has waited for."""
    has_waited_for_slot = group.slot_since > sequence.request.arrived_at
    refusal = sequence.refusal
    return ((Reason.NOT_IN_SLOT.value,) if has_waited_for_slot else ()) + ((refusal.reason,) if refusal else ())
