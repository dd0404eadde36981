"""Slot shares give each tenant its part of the slots; within its part, the slot policy decides."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from rota.policy.fairness import may_take, share
from rota.scheduler.accounts import Account
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.moves import Moves
from rota.scheduler.slot_candidates import SlotCandidates


class SlotShares:
    """A tenant that holds fewer slots than its share gets one at once, from the tenant that holds most."""

    def __init__(self, books: Books, admission: Admission, candidates: SlotCandidates, moves: Moves) -> None:
        self._books = books
        self._admission = admission
        self._candidates = candidates
        self._moves = moves

    def give(self, draft: Draft) -> None:
        if not self._books.accounts.are_shared:
            return
        seated = (self._books.groups[adapter_id] for adapter_id in self._books.slots.residencies)
        held = Counter(group.main_account for group in seated if group.users)
        for account in sorted(self._books.accounts.active.values(), key=lambda one: (one.rank, one.name)):
            if self._candidates.copies <= 0:
                return
            if held[account] + 1 <= self._share(account) or not held[account]:
                self._give_to(draft, account, held)

    def _give_to(self, draft: Draft, account: Account, held: Counter[Account | None]) -> None:
        own = map(self._books.groups.__getitem__, islice(account.adapters, LOOK_AHEAD))
        comer = next(filter(self._is_claimant, own), None)
        if comer is None or (leaver := self._leaver(account, held)) is None:
            return
        self._moves.replace(draft, leaver, comer)
        held[account] += 1
        held[leaver.main_account] -= 1

    def _is_claimant(self, group: Group) -> bool:
        if group.adapter_id not in self._books.absent or not self._candidates.is_at_hand(group.adapter_id):
            return False
        return self._admission.can_work(group) or self._would_get_a_row(group)

    def _would_get_a_row(self, group: Group) -> bool:
        """Would another tenant make room for the group's first request, once its adapter is in a slot?"""
        first, books = group.queue.next(), self._books
        if first is None or first.flights or first.account.is_full:
            return False
        return may_take(first.account, books.accounts.weights, books.rows.total, first.account.rows, 1)

    def _leaver(self, taker: Account, held: Counter[Account | None]) -> Group | None:
        """Of the tenant that holds most slots for its weight, more than its share: the adapter that runs least."""
        able = [
            group
            for group in self._books.residents
            if (owner := group.main_account) is not None
            and owner is not taker
            and held[owner] > max(1.0, self._share(owner))
            and self._candidates.may_leave(group.adapter_id)
        ]
        return max(able, key=lambda group: (self._level(group, held), -group.running, group.adapter_id), default=None)

    def _level(self, group: Group, held: Counter[Account | None]) -> float:
        owner = group.main_account
        assert owner is not None, "a group with users has an owner"
        return held[owner] / owner.weight

    def _share(self, account: Account) -> float:
        return share(account, self._books.accounts.weights, self._books.slots.total)
