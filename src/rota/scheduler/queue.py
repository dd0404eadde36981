"""The waiting queue holds sequences in order of arrival, also those that come back after a preemption."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from rota.core.ids import RequestId
from rota.scheduler.sequence import Arrival, Sequence

Entry = tuple[Arrival, int, Sequence]  # the number keeps sequences from being compared

# Entries of sequences that left stay in the heap; they are cleared away when they are more than this, and more than
# those of sequences that wait.
MOST_LEFT_BEHIND = 64


class WaitingQueue:
    """A heap by arrival; the entry of a sequence that leaves from the middle is dropped when it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._numbers = count()
        self._entries: dict[RequestId, Entry] = {}  # the valid entries; the heap may have others

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order; for explanations and checks."""
        return (sequence for _, _, sequence in self._entries.values())

    def push(self, sequence: Sequence) -> None:
        entry = (sequence.arrival, next(self._numbers), sequence)
        self._entries[sequence.request_id] = entry
        heapq.heappush(self._heap, entry)

    def first(self) -> Sequence | None:
        """The sequence that arrived first; it stays in the queue."""
        while self._heap:
            entry = self._heap[0]
            sequence = entry[2]
            if self._entries.get(sequence.request_id) is entry:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.request_id]
        if len(self._heap) > MOST_LEFT_BEHIND + 2 * len(self._entries):
            # While the first sequence stays, entries behind it never come to the top, and keep prompts in memory.
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
