"""Turns decide, once a pass, which adapters hold the device's slots."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import islice

from rota.core.events import SlotReason
from rota.core.ids import AdapterId
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.fetching import Fetching
from rota.scheduler.group import Group
from rota.scheduler.moves import Moves, vacate
from rota.scheduler.slot_candidates import SlotCandidates
from rota.scheduler.slot_shares import SlotShares


class Turns:
    """Gives away empty slots first, then idle residents' slots, then those that the policy takes from busy ones."""

    def __init__(
        self,
        books: Books,
        admission: Admission,
        fetching: Fetching,
        candidates: SlotCandidates,
        moves: Moves,
        shares: SlotShares,
        policy: SlotPolicy,
    ) -> None:
        self._books = books
        self._admission = admission
        self._fetching = fetching
        self._candidates = candidates
        self._moves = moves
        self._shares = shares
        self._policy = policy

    def take(self, draft: Draft) -> None:
        self._moves.land(draft)
        self._let_policy_observe(draft)
        if not self._books.absent:
            return
        self._fetching.order(draft, [*sorted(self._policy.reserved), *self._policy.wanted])
        idle = self._candidates.idle()
        if idle or self._books.slots.empty:
            self._fill(draft, idle)
        if self._books.absent:
            self._shares.give(draft)
            self._replace(draft)

    def _let_policy_observe(self, draft: Draft) -> None:
        policy = self._policy
        edition = policy.due_edition
        policy.observe(self._candidates, draft.now)
        if news := policy.take_news():  # a policy does not know which engine it decides for
            self._books.outbox += [replace(event, engine_id=self._books.engine_id) for event in news]
        if policy.due_edition != edition:
            self._books.sort_absent()

    # ── free slots ───────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, draft: Draft, idle: list[Group]) -> None:
        """Give away empty slots and those of idle residents."""
        books, reserved = self._books, self._policy.reserved
        kept = sum(
            adapter_id in books.absent for adapter_id in reserved
        )  # free slots that only reserved adapters may take
        for group in self._line(draft, idle, reserved):
            is_reserved = group.adapter_id in reserved
            self._close(draft, idle, group, is_reserved)
            if books.slots.empty + len(idle) <= (0 if is_reserved else kept):
                return
            if not self._candidates.is_at_hand(group.adapter_id):
                continue
            if books.slots.empty:
                self._moves.move_in(draft, group, SlotReason.SLOT_EMPTY)
            elif leaver := self._leaver(idle, group, is_reserved):
                idle.remove(leaver)
                vacate(books, leaver, draft.now, SlotReason.IDLE)
                self._moves.move_in(draft, group, SlotReason.RESIDENT_IDLE)
            elif not is_reserved and self._admission.can_work(group):
                return  # adapters that are due later have no better claim
            else:
                continue
            kept -= is_reserved

    def _close(self, draft: Draft, idle: list[Group], successor: Group, is_reserved: bool) -> None:
        """Idle residents leave slots that have closed: only when all these are left can `successor` come."""
        while self._books.slots.surplus and (leaver := self._leaver(idle, successor, is_reserved)):
            idle.remove(leaver)
            vacate(self._books, leaver, draft.now, SlotReason.IDLE)

    def _line(self, draft: Draft, idle: list[Group], reserved: Set[AdapterId]) -> Iterator[Group]:
        """Adapters with a reserved slot; then any adapter while a slot is unused; then adapters that could start."""
        books = self._books
        yield from (books.groups[adapter_id] for adapter_id in sorted(reserved) if adapter_id in books.absent)
        yield from (books.groups[view.adapter_id] for view in self._policy.line(self._candidates, draft.now))
        if any(resident.users and not self._admission.can_work(resident) for resident in idle):
            # A parked adapter's unfinished answers may hold what they wait for: a row, KV, or the last place of a key.
            yield from (books.groups[view.adapter_id] for view in islice(books.absent.parked, LOOK_AHEAD))
        for group in self._candidates.at_hand():
            if not books.slots.empty and all(resident.users for resident in idle):
                break
            yield group

    def _leaver(self, idle: list[Group], successor: Group, is_reserved: bool) -> Group | None:
        """The idle resident that makes room for `successor`, if there is one."""
        unused = [group.adapter_id for group in idle if not group.users]
        if unused:
            return self._books.groups[self._books.slots.first_to_leave(unused)]
        can_work = self._admission.can_work
        if not can_work(successor):
            return None
        due_at = self._books.due_at(successor)
        later = [group for group in idle if is_reserved or group.oldest_at > due_at or not can_work(group)]
        return max(later, key=lambda group: (group.oldest_at, group.adapter_id), default=None)

    # ── busy slots ───────────────────────────────────────────────────────────────────────────────────────────────

    def _replace(self, draft: Draft) -> None:
        """Busy residents make room for the adapters that the policy prefers."""
        groups, candidates, now = self._books.groups, self._candidates, draft.now
        draft.ask_again(self._policy.ask_again_at(candidates, now))
        for turn in self._policy.turns(candidates, now)[: max(0, candidates.copies)]:
            leaver, successor = groups[turn.leaver], groups[turn.successor]
            assert candidates.may_leave(turn.leaver), "a policy took the slot of a resident that may not leave"
            assert turn.successor in self._books.absent, "a policy chose an adapter that has a slot or no work"
            assert candidates.is_at_hand(turn.successor), "a policy chose an adapter that is no claimant"
            self._moves.replace(draft, leaver, successor)
