"""Seating gives rows to sequences that hold KV and whose adapter is in a slot, but whose row was taken meanwhile."""

from __future__ import annotations

import heapq
from itertools import islice

from rota.core.plan import Seat
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.sequence import Arrival, Sequence
from rota.scheduler.sharing import Sharing
from rota.scheduler.version_moves import tell_move


class Seating:
    """Acts before decodes are planned: these sequences decode in the same step, and nothing is computed anew."""

    def __init__(self, books: Books, sharing: Sharing) -> None:
        self._books = books
        self._sharing = sharing

    def sit_down(self, draft: Draft) -> None:
        books = self._books
        if books.running_count == books.rows.total - books.rows.free:
            return  # every sequence that holds KV has a row
        spare = max(0, books.rows.available - len(draft.invited))
        lines = [self._line(group, spare + 1) for group in books.open_groups if group.rowless]
        for _, _, sequence in heapq.merge(*lines):
            if spare <= 0 and not self._make_row(draft, sequence):
                return
            spare -= 1
            self._sit(draft, sequence)

    def _line(self, group: Group, most: int) -> list[tuple[float, Arrival, Sequence]]:
        """An adapter's first sequences without a row. While a step is in flight, the newest token is not known yet."""
        ready = (one for one in group.rowless if not one.flights)
        return [(one.account.rank, one.arrival, one) for one in islice(ready, most)]

    def _make_row(self, draft: Draft, sequence: Sequence) -> bool:
        """Another tenant may hold more than its share of the rows."""
        return self._books.accounts.are_shared and self._sharing.make_row(draft, sequence)

    def _sit(self, draft: Draft, sequence: Sequence) -> None:
        group = self._books.group_of(sequence)
        group.part(sequence)
        self._books.take_row(sequence)
        group.join(sequence, sequence.phase)
        sequence.refusal = None
        tell_move(self._books, sequence, draft.now)
        draft.seats.append(seat_of(sequence))


def seat_of(sequence: Sequence) -> Seat:
    assert sequence.row is not None
    return Seat(
        request_id=sequence.request_id,
        row=sequence.row,
        adapter_id=sequence.request.adapter_id,
        # A prompt of 32,000 tokens takes half a millisecond to copy.
        tokens=tuple(sequence.tokens) if sequence.output_length else sequence.request.prompt,
        prompt_length=sequence.prompt_length,
        blocks=tuple(sequence.blocks),
        sampling=sequence.request.sampling,
        computed=sequence.computed,
    )
