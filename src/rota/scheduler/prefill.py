"""Prompts that have begun share a step with newcomers: the prefill budget says how, for each tenant by itself."""

from __future__ import annotations

from rota.policy.prefill_budget import newcomers_part, split
from rota.scheduler.accounts import Account
from rota.scheduler.batch import Batch
from rota.scheduler.plan_builder import PlanBuilder, PrefillBacklog
from rota.scheduler.sequence import Sequence
from rota.scheduler.state import SchedulerState

# ── prefill shares ──────────────────────────────────────────────────────────────────────────────────────────────────
# Prefill shares divide a step's tokens between tenants, so that one tenant's long prompt does not fill every step.


def prefill_shares(state: SchedulerState, budget: int) -> dict[Account, int]:
    """How many tokens of prompts that have begun a step takes, by tenant.

    Tenants count that have begun a prompt, and those whose turn it is to start one. What they do not use goes to
    prompts that start in this step.
    """
    begun = {sequence.account for group in state.open_groups for sequence in group.prefilling}
    if not begun:
        return {}
    firsts = (group.queue.next() for group in state.open_groups)
    coming = {first.account for first in firsts if first and not first.account.is_full and not first.steps_in_flight}
    weights = sum(account.weight for account in begun | coming)
    return {account: max(1, int(budget * account.weight / weights)) for account in begun}


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class PrefillSharing:
    """Acts twice in a pass: before newcomers start, and with what they leave."""

    def __init__(self, state: SchedulerState, batch: Batch) -> None:
        self._state = state
        self._batch = batch

    def begin(self, builder: PlanBuilder) -> None:
        """Continue prompts that have begun; the prefill delayer does not hold these back."""
        begun = [sequence for group in self._state.open_groups for sequence in group.prefilling]
        if not begun:
            return
        of: dict[Account, list[Sequence]] = {}
        for sequence in begun:
            of.setdefault(sequence.account, []).append(sequence)
        shares = prefill_shares(self._state, builder.budget) if self._state.accounts.are_shared else {}
        share_of = {account: shares.get(account, builder.budget) for account in of}
        for account, own in of.items():
            if sum(sequence.rest for sequence in own) > share_of[account]:
                self._begin_backlog(builder, own, share_of[account])
        for sequence in begun:
            if sequence.account not in builder.backlogs:
                self._batch.plan_chunk(builder, sequence)

    def _begin_backlog(self, builder: PlanBuilder, prompts: list[Sequence], budget: int) -> None:
        backlog = PrefillBacklog(split(prompts, budget, min(self._state.priorities)), budget)
        builder.backlogs[prompts[0].account] = backlog
        builder.portions |= dict.fromkeys(prompts, 0)  # in the plan prompts that have begun stand before newcomers
        for sequence, tokens in backlog.split.first:
            backlog.note(sequence, self._batch.plan_chunk(builder, sequence, tokens))

    def start(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Plan the first chunk of a newcomer; True if it is so long that only short ones may start beside it."""
        builder.portions.setdefault(sequence, 0)  # a prompt of this step, also if no token of it fits
        backlog, left = builder.backlogs.get(sequence.account), builder.budget
        if backlog is None and sequence.rest - left > builder.prompt_budget:
            builder.backlogs[sequence.account] = PrefillBacklog(
                split([sequence], left, min(self._state.priorities)), left
            )
            self._batch.plan_chunk(builder, sequence, max(1, left - newcomers_part(builder.prompt_budget)))
            builder.backlogs[sequence.account].left = builder.budget
            return True
        planned = self._batch.plan_chunk(builder, sequence, left)
        if backlog:
            backlog.note(sequence, planned)
        return False

    def fill(self, builder: PlanBuilder) -> None:
        """Prompts that have begun get what newcomers left."""
        for backlog in builder.backlogs.values():
            for sequence in backlog.split.then:
                backlog.note(sequence, self._batch.plan_chunk(builder, sequence, backlog.left))
            backlog.settle()
