"""Sharing makes room for tenants that hold less than their share: sequences of tenants that hold more are preempted."""

from __future__ import annotations

from collections.abc import Callable

from rota.policy.fairness import gives_up, may_take
from rota.scheduler.accounts import Account
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.reasons import Reason
from rota.scheduler.running_tenants import RunningTenants
from rota.scheduler.sequence import Refusal, Sequence

Held = Callable[[Account], int]

# How many waiting sequences of all adapters are looked at in a pass.
MOST_LOOKS = 64


class Sharing:
    """Acts before decodes are planned, since a sequence in the step can no longer be preempted.

    A preempted sequence keeps its tokens. Its KV stays findable until the blocks are needed, so with prefix caching it
    mostly goes on where it was.
    """

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission
        self._running: RunningTenants | None = None
        self._no_giver: set[tuple[Held, bool]] = set()

    def make_room(self, draft: Draft) -> None:
        if not self._books.accounts.are_shared:
            return
        self._running, self._no_giver = None, set()
        self._make_room_to_grow(draft)
        if not self._books.waiting:
            return
        left = MOST_LOOKS
        for group in self._groups(draft):
            for sequence in group.queue.in_turn(min(LOOK_AHEAD, left)):
                left -= 1
                if self._is_short(draft, sequence) and self._make_room_for(draft, sequence):
                    draft.invited.append(sequence)
                if len(draft.invited) == LOOK_AHEAD:
                    return
            if left <= 0:
                return

    def _groups(self, draft: Draft) -> list[Group]:
        """The adapters whose requests may start. If they are many, each pass begins with another one."""
        groups = self._books.open_groups
        first = draft.step_id % len(groups) if len(groups) * LOOK_AHEAD > MOST_LOOKS else 0
        return groups[first:] + groups[:first]

    def _make_room_to_grow(self, draft: Draft) -> None:
        """Free the blocks that decodes need in this step, before chance decides whose sequence finds none."""
        blocks = self._books.blocks
        if blocks.free >= self._books.running_count:
            return
        growing = self._books.growing()
        while blocks.free < len(growing) and (victim := self._victim(None, blocks.total, _blocks)):
            self._preempt(draft, victim)
            growing.discard(victim)

    def make_row(self, draft: Draft, sequence: Sequence) -> bool:
        """Free a row for a sequence that holds KV already, if its tenant has less than its share of the rows."""
        self._running, self._no_giver = None, set()  # rows have changed hands since then
        return self._take(draft, sequence.account, self._books.rows.total, _rows, 1)

    def _is_short(self, draft: Draft, sequence: Sequence) -> bool:
        """Does a sequence lack only a row or KV?"""
        if sequence.flights or sequence.account.is_full:
            return False
        books, group = self._books, self._books.group_of(sequence)
        is_short = not books.has_row(group) or self._lacks_row(draft) or self._lacks_kv(draft, sequence)
        return is_short and self._admission.lets_in(sequence, group)

    def _make_room_for(self, draft: Draft, sequence: Sequence) -> bool:
        books, taker = self._books, sequence.account
        if not books.has_row(books.group_of(sequence)) and not self._may_take(taker, books.rows.total, _rows, 1):
            return False
        while self._lacks_row(draft):
            if not self._take(draft, taker, books.rows.total, _rows, 1):
                return False
        needed = books.blocks.blocks_for(len(sequence.tokens))
        if self._lacks_kv(draft, sequence) and books.blocks.free + self._seen.could_free(taker) < needed:
            return False  # to preempt others would be in vain, in this pass and in the next
        while self._lacks_kv(draft, sequence):
            if not self._take(draft, taker, books.blocks.total, _blocks, needed):
                return False
        return True

    def _lacks_row(self, draft: Draft) -> bool:
        return self._books.rows.available <= len(draft.invited)

    def _lacks_kv(self, draft: Draft, sequence: Sequence) -> bool:
        blocks = self._books.blocks
        promised = sum(blocks.blocks_for(len(one.tokens)) for one in draft.invited)
        # In this step some sequences that run get one more block, before the new one gets its blocks.
        promised += -(-self._books.running_count // blocks.block_size)
        return self._admission.lacks_kv(sequence, promised)

    def _take(self, draft: Draft, taker: Account, total: int, held: Held, more: int) -> bool:
        """Preempt one sequence of another tenant for `taker`; False if `taker` has no right to that."""
        if not self._may_take(taker, total, held, more):
            return False
        victim = self._victim(taker, total, held)
        if victim:
            self._preempt(draft, victim)
        return victim is not None

    def _may_take(self, taker: Account, total: int, held: Held, more: int) -> bool:
        return may_take(taker, self._books.accounts.weights, total, held(taker), more)

    def _victim(self, taker: Account | None, total: int, held: Held) -> Sequence | None:
        """The sequence that gives up its place, of the tenant that holds most."""
        case = (held, taker is not None and not taker.seats)
        if case in self._no_giver:
            return None  # what no tenant gives up for one taker, it gives up for no other in this pass
        is_for_row = held is _rows
        able = (one for one in self._seen.accounts if one.rows > 1 or not is_for_row)
        giver = gives_up(able, taker, self._books.accounts.weights, total, held)
        if giver is None:
            self._no_giver.add(case)
            return None
        return self._seen.first_to_go(giver, is_for_row)

    @property
    def _seen(self) -> RunningTenants:
        """Looked at once a pass, when it is first needed."""
        if self._running is None:
            self._running = RunningTenants(self._books)
        return self._running

    def _preempt(self, draft: Draft, victim: Sequence) -> None:
        self._books.preempt(victim, draft)
        self._seen.remove(victim)
        victim.refusal = Refusal(Reason.OTHER_TENANT, draft.now)


def _rows(account: Account) -> int:
    return account.rows


def _blocks(account: Account) -> int:
    return account.blocks
