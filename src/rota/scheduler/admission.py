"""Admission asks, in a visible order, whether a waiting sequence may start, and says why when it may not."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from rota.core.errors import Fault, FaultCode, prompt_too_long
from rota.core.events import PrefillsReleased
from rota.core.ids import BlockId, RequestId
from rota.core.request import Request
from rota.core.tenant import Tenant
from rota.policy.prefill_delayer import DelayVerdict, PrefillDelayer
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.adapter_state import Group, Standing
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.prefix import PrefixLookup, findable
from rota.scheduler.sequence import Arrival, Reason, Sequence
from rota.scheduler.state import SchedulerState

# ── request limits ──────────────────────────────────────────────────────────────────────────────────────────────────
# Request limits say what is wrong with a request that can never be served, or not now.


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model, the KV cache and the queue can take."""

    max_sequence_tokens: int
    max_queued: int
    vocabulary: int | None  # token ids lie below it; None: any id may come

    def fault_of(self, request: Request, state: SchedulerState, held: Collection[RequestId] = ()) -> Fault | None:
        """Why a request cannot be taken; None if it can. `held` are open too, and in no queue."""
        group = state.groups.get(request.adapter_id)
        if request.request_id in state.sequences or request.request_id in held:
            return Fault(FaultCode.DUPLICATE_ID, f"A request with the id {request.request_id} is already open.")
        if group is None or group.standing is Standing.LEAVING:
            return Fault(FaultCode.UNKNOWN_ADAPTER, "The adapter this request asks for is not loaded.", "model")
        if fault := self._fault_of_prompt(request, state.blocks.total * state.blocks.block_size):
            return fault
        if state.waiting + len(held) >= self.max_queued:
            return Fault(FaultCode.QUEUE_FULL, f"{self.max_queued} requests already wait; try again later.")
        return _fault_of_tenant(request.tenant, state)

    def _fault_of_prompt(self, request: Request, kv_tokens: int) -> Fault | None:
        length = len(request.prompt)
        if length >= self.max_sequence_tokens:
            longest = self.max_sequence_tokens
            return prompt_too_long(f"{length} tokens > {longest - 1} maximum", longest, "prompt")
        if length >= kv_tokens:
            why = " here, as many as the KV cache holds (mem_fraction_static, kv_blocks)"
            return prompt_too_long(f"{length} tokens > {kv_tokens - 1} maximum", kv_tokens, "prompt", why)
        if self.vocabulary is not None and (largest := max(request.prompt)) >= self.vocabulary:
            # A tokenizer may know more tokens than its model, such as padding; an unknown id would crash the device.
            return Fault(
                FaultCode.BAD_FIELD,
                f"The prompt holds the token id {largest}, but the model has only {self.vocabulary} tokens.",
                "prompt",
            )
        return self._fault_of_tokens(request)

    def _fault_of_tokens(self, request: Request) -> Fault | None:
        """A token that the model does not have would be written outside its row."""
        if self.vocabulary is None:
            return None
        for field, token in request.sampling.largest_tokens:
            if token >= self.vocabulary:
                message = f"{field} holds the token id {token}, but the model has only {self.vocabulary} tokens."
                return Fault(FaultCode.BAD_FIELD, message, field)
        return None


def _fault_of_tenant(tenant: Tenant, state: SchedulerState) -> Fault | None:
    account = state.accounts.get(tenant)
    if account is None or tenant.max_queued is None or account.waiting < tenant.max_queued:
        return None
    return queue_fault(tenant)


def queue_fault(tenant: Tenant) -> Fault:
    """As many requests of a tenant wait as may."""
    message = f"{tenant.max_queued} requests of this key already wait, as many as may (max_queued); try again later."
    return Fault(FaultCode.QUEUE_FULL, message)


# ── admission ───────────────────────────────────────────────────────────────────────────────────────────────────────

# While requests wait for KV, this many are looked at in a pass to find one that needs less.
LOOK_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sequence would sit down with: KV blocks that are already written, and how many more it needs."""

    cached: list[BlockId]
    fresh: int


class Admission:
    """Answers questions and changes nothing."""

    def __init__(self, state: SchedulerState, is_caching: bool, policy: SlotPolicy) -> None:
        self._state = state
        self._is_caching = is_caching
        self._policy = policy
        self.lookup = PrefixLookup(state.blocks)

    def consider(
        self, sequence: Sequence, group: Group, delay: DelayVerdict | None, is_invited: bool = False
    ) -> Offer | Reason:
        """May `sequence`, whose adapter is at hand, start now? For an invited one other tenants made room."""
        if not self._state.rows.available or not (is_invited or self._state.has_row(group)):
            return Reason.NO_ROW
        if sequence.account.is_full:
            return Reason.TENANT_FULL
        if sequence.steps_in_flight:
            return Reason.IN_FLIGHT
        if not self.lets_in(sequence, group):
            return Reason.MAKING_ROOM
        if delay and not delay.is_allowed and not self._has_fresh_slot(group):
            return Reason.DELAYED
        return self._offer(sequence)

    def lets_in(self, sequence: Sequence, group: Group) -> bool:
        """May an adapter that is at hand still take `sequence`? One that makes room takes only what will be brief."""
        return self._policy.admits(group, self._steps_needed(sequence, group))

    def has_room(self, sequence: Sequence) -> bool:
        """Could `sequence` start if its adapter were at hand?"""
        account = sequence.account
        if sequence.steps_in_flight or account.is_full or not self._state.has_row(self._state.group_of(sequence)):
            return False
        line_ends_at = self._state.line_ends_at.get(account.name)
        if line_ends_at is not None and sequence.arrival > line_ends_at:
            return False
        return bool(self._has_kv(sequence))

    def can_work(self, group: Group) -> bool:
        """Would an adapter run if it were in a slot? It holds KV already, or there is KV for its first request."""
        return bool(group.running or ((first := group.queue.first()) and self.has_room(first)))

    def lacks_kv(self, sequence: Sequence, promised: int = 0) -> bool:
        """Are there too few free blocks for `sequence`, wherever its adapter is? Some may be promised to others."""
        return self._has_kv(sequence, promised) is False

    def _steps_needed(self, sequence: Sequence, group: Group) -> int:
        """How many steps a sequence will need, if its answer is no longer than earlier ones."""
        prompt_steps = math.ceil(len(sequence.tokens) / self._state.step_tokens)
        return prompt_steps + group.most_tokens(sequence)

    def _has_fresh_slot(self, group: Group) -> bool:
        """Has the adapter not run yet in its slot? A slot that was given up for it must not stand idle."""
        residency = self._state.slots.residencies.get(group.adapter_id)
        return residency is not None and not residency.has_run

    def _offer(self, sequence: Sequence) -> Offer | Reason:
        has_kv, needed = self._has_kv(sequence), self._needed(sequence)
        if has_kv is False:
            return Reason.NO_KV
        if not self._is_caching:
            return Offer([], needed)
        if has_kv is None or not self.lookup.is_complete(sequence):
            return Reason.LOOKED_UP
        cached = self.lookup.blocks_of(sequence)
        self.lookup.charge(needed)
        return Offer(cached, needed - len(cached))

    def _has_kv(self, sequence: Sequence, promised: int = 0) -> bool | None:
        """Are there blocks for a sequence? None: a later pass knows, when more of its prompt is looked up."""
        blocks, needed = self._state.blocks, self._needed(sequence)
        # One block is left for each running sequence, or the new sequence would soon be preempted when they grow.
        spare = blocks.free - promised - self._state.running_count
        if needed <= spare:
            return True
        if not self._is_caching or needed - findable(sequence, blocks.block_size) > spare:
            return False
        is_complete = self.lookup.is_complete(sequence)
        if needed - self.lookup.held(sequence) > spare:
            return False if is_complete else None
        return blocks.cost_of(self.lookup.blocks_of(sequence), needed) <= spare

    def _needed(self, sequence: Sequence) -> int:
        return self._state.blocks.blocks_for(len(sequence.tokens))


# ── delays ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Delays ask the prefill delayer once a pass, and count how long each request is held back.

# The first of an adapter's queue: the rank of its tenant, and its arrival. No two share an arrival, so sequences are
# never compared.
Head = tuple[float, Arrival, Sequence, Group]


class Delays:
    """Without a delayer every prompt may start."""

    def __init__(self, state: SchedulerState, admission: Admission, delayer: PrefillDelayer | None) -> None:
        self._state = state
        self._admission = admission
        self._delayer = delayer
        self._held_back: list[Sequence] = []  # since the last pass
        self._held_back_at = 0.0

    def ask(self, builder: PlanBuilder, heads: list[Head]) -> DelayVerdict | None:
        """May prompts start? `heads` are the sequences that could."""
        if not self._delayer:
            return None
        state = self._state
        firsts = [first for _, _, first, _ in sorted(heads)]
        for sequence in self._held_back:
            sequence.held_s += builder.now - self._held_back_at
        admissible = self._admissible(heads)
        verdict = self._delayer.decide(
            running=state.rows.in_use,
            admissible=admissible,
            token_usage=1.0 - state.blocks.free / state.blocks.total,
            now=builder.now,
            blocked_by_adapters=not heads and bool(state.absent),
            oldest_delay_s=max((first.held_s for first in firsts), default=0.0),
        )
        # A sequence without a row could not start anyway.
        self._held_back, self._held_back_at = [] if verdict.is_allowed else firsts[: state.rows.available], builder.now
        if verdict.is_allowed and admissible:  # without prompts here the verdict is on other replicas' prompts
            released = PrefillsReleased(
                at=builder.now,
                reason=verdict.reason,
                passes=verdict.passes,
                waited_s=verdict.waited_s,
                engine_id=state.engine_id,
            )
            state.outbox.append(released)
        if not verdict.is_allowed and heads:
            # Without work in flight nothing else would make the loop ask again.
            builder.ask_again(verdict.ask_again_at)
        return verdict

    def _admissible(self, heads: list[Head]) -> int:
        """How many requests could start now, about: one head at a time, and those behind it as if they were as short
        as the shortest of its tenant there."""
        state, left = self._state, self._state.rows.available
        promised = 0  # blocks
        count = 0
        for _, _, first, group in heads:
            if count >= left:
                break
            likely = self._first_that_fits(first, group, promised)
            if likely is None:
                continue
            needed = state.blocks.blocks_for(likely.length)
            spare = max(needed, state.blocks.free - state.running_count - promised)
            more = min(group.waiting, spare // needed)
            count += more
            promised += more * needed
        return min(count, left)

    def _first_that_fits(self, first: Sequence, group: Group, promised: int) -> Sequence | None:
        """The head of a queue, or the shortest sequence of its tenant there, if KV blocks and its key allow a start."""
        for sequence in (first, group.queue.shortest_of(first.account)):
            if sequence is None or sequence.steps_in_flight or sequence.account.is_full:
                continue
            if not self._admission.lacks_kv(sequence, promised):
                return sequence
        return None

    def note_admitted(self, prompts: int) -> None:
        """This many prompts started in this pass."""
        if self._delayer and prompts:
            self._delayer.note_batch(prompts)
