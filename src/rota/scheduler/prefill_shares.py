"""Prefill shares divide a step's tokens between tenants, so that one tenant's long prompt does not fill every step."""

from __future__ import annotations

from rota.scheduler.accounts import Account
from rota.scheduler.books import Books


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
