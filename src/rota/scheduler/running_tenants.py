"""The running tenants are a look at all running sequences by tenant, made once for all decisions of a pass."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from rota.scheduler.accounts import Account
from rota.scheduler.books import Books
from rota.scheduler.sequence import Sequence, first_to_yield


class RunningTenants:
    """Of each tenant the sequences in the order in which they give up their place, the first one last."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._sequences: dict[Account, list[Sequence]] = {}
        for sequence in books.running():
            self._sequences.setdefault(sequence.account, []).append(sequence)
        self._open_ids = {group.adapter_id for group in books.open_groups}
        self._is_sorted: set[Account] = set()

    @property
    def accounts(self) -> Collection[Account]:
        return self._sequences.keys()

    def first_to_go(self, account: Account, has_row: bool) -> Sequence:
        """The first sequence of a tenant to give up its place, or the first one that has a row."""
        sequences = self._sequences[account]
        if account not in self._is_sorted:
            sequences.sort(key=lambda one: first_to_yield(one, self._open_ids))
            self._is_sorted.add(account)
        return next(one for one in reversed(sequences) if one.row is not None or not has_row)

    def remove(self, sequence: Sequence) -> None:
        """The first one to go of its tenant was preempted."""
        account = sequence.account
        self._sequences[account].remove(sequence)
        self._spare[account] = self._spare_of(account)

    def could_free(self, taker: Account) -> int:
        """The blocks of all sequences that other tenants could lose: of each tenant all but the oldest."""
        return sum(self._spare.values()) - self._spare.get(taker, 0)

    @cached_property
    def _spare(self) -> dict[Account, int]:
        return {account: self._spare_of(account) for account in self._sequences}

    def _spare_of(self, account: Account) -> int:
        oldest = min(self._sequences[account], key=lambda one: one.arrival, default=None)
        return account.blocks - len(oldest.held_blocks) if oldest else 0
