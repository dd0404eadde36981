"""The batch fills a step with the tokens of running sequences: decodes first, then prompts that have begun."""

from __future__ import annotations

import math
from collections import Counter

from rota.core.plan import Chunk, Grant, Pool, Scoring
from rota.core.request import Pooling
from rota.policy.prefill_budget import MOST_WORK, most_tokens, newcomers_part, work_of
from rota.policy.slot_policy import SlotPolicy
from rota.policy.step_times import LEAST_TOKENS, StepBudget
from rota.scheduler.adapter_state import Group
from rota.scheduler.plan_builder import PlanBuilder
from rota.scheduler.sequence import Phase, Sequence, first_to_yield
from rota.scheduler.state import SchedulerState


class Batch:
    """Takes what it plans: rows, blocks, tokens in flight."""

    def __init__(self, state: SchedulerState, policy: SlotPolicy, step_budget: StepBudget | None = None) -> None:
        """`step_budget` says how much of prompts a step has time for; None: for any."""
        self._state = state
        self._policy = policy
        self._step_budget = step_budget
        self._victims: list[Sequence] = []  # the first to give up its KV last
        self._victims_of = 0  # the step for which they were found

    def plan_decodes(self, builder: PlanBuilder) -> None:
        decodes, rows, step_id = builder.step.decodes, builder.decodes, builder.step_id
        decode = Phase.DECODE  # looked up once: Python 3.11 is slow to look up a member of an enumeration
        resting = self._policy.prompts_only
        for group in self._state.open_groups:
            if group.adapter_id in resting:
                continue
            before = len(rows)
            context_tokens = 0
            # A copy, because growth may preempt a sequence of this list.
            for sequence in group.decoding.copy():
                planned = sequence.planned
                if planned >= sequence.limit - 1 or sequence.phase is not decode:
                    continue  # its last token is in flight, or it was preempted a moment ago
                if planned == sequence.room and not self._grow(builder, sequence):
                    continue
                planned += 1
                sequence.planned = planned
                sequence.steps_in_flight += 1
                sequence.step_id = step_id
                context_tokens += planned
                decodes.append(sequence)
                rows.append(sequence.row)  # type: ignore[arg-type]  # a sequence that decodes has a row
            if len(rows) > before:
                builder.context_tokens += context_tokens
                self._note_run(builder, group, len(rows) - before)
        builder.budget = self._beside(len(rows), builder.budget)
        if self._step_budget is not None:
            self._limit_time(builder, self._step_budget, len(rows))
        builder.prompt_budget = builder.budget
        self._charge_decodes(decodes)

    def _beside(self, decodes: int, budget: int) -> int:
        """What decodes leave of a step: their padding counts too, as long as something is left."""
        step = self._state.row_step
        left = budget - -(-decodes // step) * step
        return left if left > 0 else budget - decodes

    def _limit_time(self, builder: PlanBuilder, step_budget: StepBudget, decodes: int) -> None:
        """Leave prompts as many tokens as the step has time for."""
        builder.time = step_budget.most_work(decodes)
        is_short = builder.time < builder.budget
        builder.budget = int(min(builder.time, builder.budget))
        self._state.step_tokens = max(1, builder.budget)
        if is_short and step_budget.wants_a_look(decodes):
            step_budget.looks(decodes)
            builder.budget = 0

    def _charge_decodes(self, decodes: list[Sequence]) -> None:
        accounts = self._state.accounts
        if accounts.are_shared:
            for account, count in Counter(sequence.account for sequence in decodes).items():
                accounts.charge(account, 0, count)
        elif decodes:
            accounts.charge(decodes[0].account, 0, len(decodes))

    def _grow(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Grant one more block. If none is free, a sequence is preempted; False if that is `sequence` itself."""
        while not self._state.blocks.free:
            victim = self._victim(builder)
            self._state.preempt(victim, builder)
            if victim is sequence:
                return False
        block = self._state.blocks.allocate_one()
        sequence.blocks.append(block)
        self._state.count_blocks(sequence, 1)
        sequence.room += self._state.blocks.block_size
        assert sequence.row is not None
        builder.grants.append(Grant(sequence.row, block))
        return True

    def _victim(self, builder: PlanBuilder) -> Sequence:
        """The sequence that gives up its KV: one that is not in this step yet."""
        if self._victims_of != builder.step_id:
            # Sorted once a pass: sequences that run grow at the same time, and many of them may find no block.
            open_ids = {group.adapter_id for group in self._state.open_groups}
            self._victims_of = builder.step_id
            self._victims = sorted(self._state.running(), key=lambda one: first_to_yield(one, open_ids))
        while True:
            victim = self._victims.pop()
            if victim.step_id != builder.step_id:
                return victim

    def plan_chunk(self, builder: PlanBuilder, sequence: Sequence, most: int | None = None) -> int:
        """Plan as much of a sequence's prompt as the step has room for, up to `most` tokens; tells how much."""
        length = min(builder.budget, sequence.rest)
        if most is not None:
            length = min(length, most)
        if start := self._seen(sequence.planned):
            length = self._within_work(builder, length, start)
        if builder.time < math.inf:
            length = self._within_time(builder, length, start)
        if length <= 0:
            return 0
        builder.portions[sequence] = builder.portions.get(sequence, 0) + length
        builder.budget = max(0, int(min(builder.budget - length, builder.time)))
        sequence.planned += length
        self._note_run(builder, self._state.group_of(sequence), 0)
        self._state.accounts.charge(sequence.account, length, 0)
        return length

    def _seen(self, start: int) -> int:
        """Tokens before a chunk, as far as it sees them."""
        return start if self._state.window is None else min(start, self._state.window)

    def _within_work(self, builder: PlanBuilder, length: int, start: int) -> int:
        """Shorten a chunk behind a long prefix while requests with short prompts are open, for which steps count."""
        deep = self._state.deep_prefix
        if deep is None or not self._state.short_prompts:
            return length
        least = 0
        if builder.work == math.inf:
            builder.work = MOST_WORK * builder.prompt_budget
            # Far behind, a step's constant costs count for more than its length.
            least = max(1, newcomers_part(builder.prompt_budget))
        length = min(length, max(least, most_tokens(builder.work, start, deep)))
        builder.work -= work_of(length, start, deep)
        return length

    def _within_time(self, builder: PlanBuilder, length: int, start: int) -> int:
        """Shorten a chunk to what the step has time for; the first of a step goes on in any case."""
        deep = self._state.deep_prefix or math.inf
        least = LEAST_TOKENS if builder.budget == builder.prompt_budget else 0
        length = min(length, max(least, most_tokens(builder.time, start, deep)))
        builder.time -= work_of(max(0, length), start, deep)
        return length

    def write_chunks(self, builder: PlanBuilder) -> None:
        """Make one chunk of all that is planned of a sequence's prompt."""
        deep = self._state.deep_prefix or math.inf
        for sequence, length in builder.portions.items():
            if not length:
                continue
            end = sequence.planned
            samples = end == len(sequence.tokens)
            assert sequence.row is not None
            builder.chunks.append(Chunk(row=sequence.row, start=end - length, length=length, samples=samples))
            builder.step.chunks.append((sequence, end))
            builder.step.prompt_tokens += length
            builder.step.work += work_of(length, self._seen(end - length), deep)
            builder.context_tokens += end
            sequence.steps_in_flight += 1
            sequence.step_id = builder.step_id
            if samples:
                builder.step.samplers.append(sequence)
            if sequence.scored < sequence.prompt_length:
                _plan_scores(builder, sequence)
            if sequence.pooling is not None:
                _plan_pool(builder, sequence, sequence.pooling, samples)

    def _note_run(self, builder: PlanBuilder, group: Group, tokens: int) -> None:
        group.attained += tokens
        if group.ran_in == builder.step_id:
            return
        group.ran_in, group.ran_at = builder.step_id, builder.now
        group.steps += 1
        if group is not self._state.base:
            builder.adapters += 1
            self._state.slots.use(group.adapter_id)

    def start_decoding(self) -> None:
        """A sequence whose last chunk is planned decodes from the next step on."""
        for group in self._state.open_groups:
            if not group.prefilling:
                continue
            for sequence in [one for one in group.prefilling if one.planned >= len(one.tokens)]:
                group.part(sequence)
                group.join(sequence, Phase.DECODE)


def _plan_scores(builder: PlanBuilder, sequence: Sequence) -> None:
    """Score the prompt tokens that a chunk can judge, unless they were scored before a preemption."""
    sampling, start = sequence.request.sampling, sequence.scored
    end = min(sequence.planned + 1, sequence.prompt_length)
    if end <= start:
        return
    assert sequence.row is not None
    assert sampling.prompt_logprobs is not None
    builder.scorings.append(Scoring(row=sequence.row, start=start, end=end, top=sampling.prompt_logprobs))
    builder.step.scored.append((sequence, end - start))
    sequence.scored = end


def _plan_pool(builder: PlanBuilder, sequence: Sequence, pooling: Pooling, is_last: bool) -> None:
    """A mean needs every chunk's hidden states; else only the last chunk's are wanted."""
    if pooling == "mean" or is_last:
        assert sequence.row is not None
        builder.pools.append(Pool(sequence.row, pooling))
        builder.step.pooled.append(sequence)
