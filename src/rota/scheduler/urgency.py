"""Urgency makes room for requests of a higher priority: the newest sequence of the lowest priority yields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rota.core.ids import BASE
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.sequence import Sequence, first_to_yield

# An urgent request waits this many steps before a sequence is preempted for it: mostly a row becomes free by itself,
# and a preempted sequence is computed again.
PATIENCE_STEPS = 4


class Urgency:
    """Acts within one tenant, before decodes are planned; where all priorities are equal it does nothing."""

    def __init__(self, books: Books, admission: Admission) -> None:
        self._books = books
        self._admission = admission

    def make_room(self, draft: Draft) -> None:
        """Make room for at most one request in a pass, so that a burst of urgent ones does not empty the device."""
        books = self._books
        if len(books.priorities) < 2:
            return
        self._make_room_to_grow(draft)
        if not books.waiting:
            return
        urgent = max(self._urgent(draft.now), key=lambda one: (one.priority, -one.arrival[0]), default=None)
        if urgent and self._is_short(draft, urgent) and self._make_room_for(draft, urgent):
            draft.invited.append(urgent)

    def _urgent(self, now: float) -> Iterator[Sequence]:
        """The most urgent sequences of tenants that have waited for some steps."""
        lowest = min(self._books.priorities)
        latest = now - PATIENCE_STEPS * self._books.step_s
        for group in self._books.open_groups:
            for first in group.queue.in_turn(LOOK_AHEAD):
                sequence = group.queue.shortest_of(first.account)
                if sequence and sequence.priority > lowest and sequence.request.arrived_at <= latest:
                    yield sequence

    def _is_short(self, draft: Draft, urgent: Sequence) -> bool:
        """Does a sequence lack only a row or KV?"""
        if urgent in draft.invited or urgent.flights or urgent.account.is_full:
            return False
        is_short = self._lacks_row(draft, urgent) or self._lacks_kv(draft, urgent)
        return is_short and self._admission.lets_in(urgent, self._books.group_of(urgent))

    def _make_room_for(self, draft: Draft, urgent: Sequence) -> bool:
        own = (one for one in self._books.running() if one.account is urgent.account)
        yielding = self._in_turn([one for one in own if one.priority < urgent.priority])
        # To preempt others in vain would be so in the next pass too: no request would ever end.
        if self._lacks_row(draft, urgent) and not self._would_have_row(draft, urgent, yielding):
            return False
        if self._lacks_kv(draft, urgent) and not self._would_have_kv(draft, urgent, yielding):
            return False
        while self._lacks_row(draft, urgent) or self._lacks_kv(draft, urgent):
            if not yielding:
                return False
            self._books.preempt(yielding.pop(), draft)
        return True

    def _lacks_row(self, draft: Draft, urgent: Sequence) -> bool:
        books = self._books
        return books.rows.available <= len(draft.invited) or not books.has_row(books.group_of(urgent))

    def _lacks_kv(self, draft: Draft, urgent: Sequence) -> bool:
        blocks = self._books.blocks
        promised = sum(blocks.blocks_for(one.length) for one in draft.invited)
        return self._admission.lacks_kv(urgent, promised + len(self._books.growing()))

    def _would_have_row(self, draft: Draft, urgent: Sequence, yielding: list[Sequence]) -> bool:
        """Is there a row for `urgent` without these, and one for each that runs beside it? See `Books.has_row`."""
        books, rows = self._books, self._books.rows
        open_ids = {group.adapter_id for group in books.open_groups}
        given_up = sum(one.row is not None and one.request.adapter_id in open_ids for one in yielding)
        if rows.available + given_up <= len(draft.invited):
            return False
        left = Counter(one.request.adapter_id for one in books.running())
        left.subtract(one.request.adapter_id for one in yielding)
        if left.total() < rows.total:
            return True
        left[urgent.request.adapter_id] += 1
        return left.pop(BASE, 0) + max(left.values(), default=0) <= rows.total

    def _would_have_kv(self, draft: Draft, urgent: Sequence, yielding: list[Sequence]) -> bool:
        """Are there blocks for `urgent` without these? As in `Admission`, one is left for each that still runs."""
        books, blocks = self._books, self._books.blocks
        could_be_free = blocks.free + sum(len(one.held_blocks) for one in yielding)
        promised = sum(blocks.blocks_for(one.length) for one in draft.invited) + len(books.growing() - {*yielding})
        still_running = books.running_count - len(yielding)
        return blocks.blocks_for(urgent.length) + promised + still_running <= could_be_free

    def _make_room_to_grow(self, draft: Draft) -> None:
        """Free the blocks that decodes need in this step, or else the order of adapters would decide who finds none."""
        books = self._books
        if books.blocks.free >= books.running_count or books.accounts.are_shared:
            return
        growing = books.growing()
        if books.blocks.free >= len(growing):
            return
        running = list(books.running())
        highest = max(one.priority for one in running)
        yielding = self._in_turn([one for one in running if one.priority < highest])
        while yielding and books.blocks.free < len(growing):
            victim = yielding.pop()
            books.preempt(victim, draft)
            growing.discard(victim)

    def _in_turn(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequence that yields first is the last."""
        open_ids = {group.adapter_id for group in self._books.open_groups}
        return sorted(sequences, key=lambda one: first_to_yield(one, open_ids))
