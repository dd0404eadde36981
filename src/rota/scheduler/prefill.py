"""Prompts that have begun share a step with newcomers: the prefill budget says how, for each tenant by itself."""

from __future__ import annotations

from rota.policy.prefill_budget import newcomers_part, split
from rota.scheduler.accounts import Account
from rota.scheduler.batch import Batch
from rota.scheduler.plan_builder import Crowd, Draft
from rota.scheduler.sequence import Sequence
from rota.scheduler.state import Books

# ── prefill shares ──────────────────────────────────────────────────────────────────────────────────────────────────
# Prefill shares divide a step's tokens between tenants, so that one tenant's long prompt does not fill every step.


def prefill_shares(books: Books, budget: int) -> dict[Account, int]:
    """How many tokens of prompts that have begun a step takes, by tenant.

    Tenants count that have begun a prompt, and those whose turn it is to start one. What they do not use goes to
    prompts that start in this step.
    """
    begun = {sequence.account for group in books.open_groups for sequence in group.prefilling}
    if not begun:
        return {}
    firsts = (group.queue.next() for group in books.open_groups)
    coming = {first.account for first in firsts if first and not first.account.is_full and not first.flights}
    weights = sum(account.weight for account in begun | coming)
    return {account: max(1, int(budget * account.weight / weights)) for account in begun}


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Prompts that have begun share a step with newcomers: the prefill budget says how, for each tenant by itself.


class PrefillSharing:
    """Acts twice in a pass: before newcomers start, and with what they leave."""

    def __init__(self, books: Books, batch: Batch) -> None:
        self._books = books
        self._batch = batch

    def begin(self, draft: Draft) -> None:
        """Continue prompts that have begun; the prefill delayer does not hold these back."""
        begun = [sequence for group in self._books.open_groups for sequence in group.prefilling]
        if not begun:
            return
        of: dict[Account, list[Sequence]] = {}
        for sequence in begun:
            of.setdefault(sequence.account, []).append(sequence)
        shares = prefill_shares(self._books, draft.budget) if self._books.accounts.are_shared else {}
        share_of = {account: shares.get(account, draft.budget) for account in of}
        for account, own in of.items():
            if sum(sequence.rest for sequence in own) > share_of[account]:
                self._crowd(draft, own, share_of[account])
        for sequence in begun:
            if sequence.account not in draft.crowds:
                self._batch.plan_chunk(draft, sequence, self._books.group_of(sequence))

    def _crowd(self, draft: Draft, prompts: list[Sequence], budget: int) -> None:
        crowd = Crowd(split(prompts, budget, min(self._books.priorities)), budget)
        draft.crowds[prompts[0].account] = crowd
        draft.portions |= dict.fromkeys(prompts, 0)  # in the plan prompts that have begun stand before newcomers
        for sequence, tokens in crowd.split.first:
            crowd.note(sequence, self._plan(draft, sequence, tokens))

    def start(self, draft: Draft, sequence: Sequence) -> bool:
        """Plan the first chunk of a newcomer; True if it is so long that only short ones may start beside it."""
        draft.portions.setdefault(sequence, 0)  # a prompt of this step, also if no token of it fits
        crowd, left = draft.crowds.get(sequence.account), draft.budget
        if crowd is None and sequence.rest - left > draft.prompt_budget:
            draft.crowds[sequence.account] = Crowd(split([sequence], left, min(self._books.priorities)), left)
            self._plan(draft, sequence, max(1, left - newcomers_part(draft.prompt_budget)))
            draft.crowds[sequence.account].left = draft.budget
            return True
        planned = self._plan(draft, sequence, left)
        if crowd:
            crowd.note(sequence, planned)
        return False

    def fill(self, draft: Draft) -> None:
        """Prompts that have begun get what newcomers left."""
        for crowd in draft.crowds.values():
            for sequence in crowd.split.then:
                crowd.note(sequence, self._plan(draft, sequence, crowd.left))
            crowd.settle()

    def _plan(self, draft: Draft, sequence: Sequence, most: int) -> int:
        return self._batch.plan_chunk(draft, sequence, self._books.group_of(sequence), most)
