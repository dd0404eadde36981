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
        if not self._books.accounts.are_shared or self._candidates.copies <= 0:
            return
        held = self._held()
        leavers = self._leavers(held)
        if not leavers:
            return
        for account in self._books.accounts.in_turn(LOOK_AHEAD):
            if held[account] + 1 > self._share(account) and held[account]:
                continue
            if not self._give_to(draft, account, leavers):
                continue
            held = self._held()
            leavers = self._leavers(held)
            if not leavers or self._candidates.copies <= 0:
                return

    def _held(self) -> Counter[Account | None]:
        """How many slots each tenant holds."""
        seated = (self._books.groups[adapter_id] for adapter_id in self._books.slots.residencies)
        return Counter(group.main_account for group in seated if group.users)

    def _give_to(self, draft: Draft, account: Account, leavers: list[Group]) -> bool:
        """Give a tenant a slot that another tenant's adapter leaves, unless there is none."""
        leaver = next((group for group in leavers if group.main_account is not account), None)
        if leaver is None:
            return False
        own = map(self._books.groups.__getitem__, islice(account.adapters, LOOK_AHEAD))
        comer = next(filter(self._is_claimant, own), None)
        if comer is None:
            return False
        self._moves.replace(draft, leaver, comer)
        return True

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

    def _leavers(self, held: Counter[Account | None]) -> list[Group]:
        """Adapters of tenants that hold more than their share: of the tenant with most, the one that runs least first.

        A tenant holds most if its slots are most for its weight.
        """
        able = [
            group
            for group in self._books.residents
            if (owner := group.main_account) is not None
            and held[owner] > max(1.0, self._share(owner))
            and self._candidates.may_leave(group.adapter_id)
        ]
        able.sort(key=lambda group: (self._level(group, held), -group.running, group.adapter_id), reverse=True)
        return able

    def _level(self, group: Group, held: Counter[Account | None]) -> float:
        owner = group.main_account
        assert owner is not None, "a group with users has an owner"
        return held[owner] / owner.weight

    def _share(self, account: Account) -> float:
        return share(account, self._books.accounts.weights, self._books.slots.total)
