"""Lateness moves requests without a first token forward among those of their tenant, at the age that they name."""

from __future__ import annotations

import heapq

from rota.core.ids import RequestId
from rota.scheduler.books import Books
from rota.scheduler.queue import MOST_LEFT_BEHIND
from rota.scheduler.sequence import Phase, Sequence

# A late request goes before those of its tenant that arrived up to so long before it. The bound keeps a tenant that
# calls all its requests urgent from starving its others.
LATE_HEAD_START_S = 60.0


class Lateness:
    """A late request takes no turn of a tenant that has got less, and makes no adapter's slot come sooner."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._due: list[tuple[float, RequestId]] = []  # a heap; it may hold requests that have ended

    def expect(self, sequence: Sequence) -> None:
        if (age_s := sequence.request.first_token_s) is not None:
            self._clear_away()
            heapq.heappush(self._due, (sequence.request.arrived_at + age_s, sequence.request_id))

    def hurry(self, now: float) -> None:
        """Move those that have become late."""
        while self._due and self._due[0][0] <= now:
            sequence = self._books.sequences.get(heapq.heappop(self._due)[1])
            if sequence is None or sequence.output_length:
                continue
            arrived_at, request_id = sequence.arrival
            sequence.turn = (arrived_at - LATE_HEAD_START_S, request_id)
            if sequence.phase is Phase.WAITING:
                self._books.group_of(sequence).queue.move(sequence)

    def _clear_away(self) -> None:
        if len(self._due) > MOST_LEFT_BEHIND + 2 * len(self._books.sequences):
            self._due = [entry for entry in self._due if entry[1] in self._books.sequences]
            heapq.heapify(self._due)
