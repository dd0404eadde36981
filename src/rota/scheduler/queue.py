"""The waiting queue holds sequences by arrival or by size, also those that come back after a preemption."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rota.core.ids import RequestId
from rota.scheduler.sequence import Arrival, Sequence

Order = Callable[[Sequence], tuple[Any, ...]]
Entry = tuple[tuple[Any, ...], int, Sequence]  # the number keeps sequences from being compared

# Entries of sequences that left stay in the heap; they are cleared away when they are more than this, and more than
# those of sequences that wait.
MOST_LEFT_BEHIND = 64


def by_arrival(sequence: Sequence) -> Arrival:
    return sequence.arrival


def by_turn(sequence: Sequence) -> Arrival:
    """Once a sequence has its first token, being late for it counts no more."""
    return sequence.arrival if sequence.output_length else sequence.turn


def by_size(sequence: Sequence) -> tuple[int, int, Arrival]:
    """The highest priority first, and of these the shortest."""
    return (-sequence.priority, sequence.length, sequence.arrival)


# One for all queues: every adapter has some, and the numbers need only grow.
_NUMBERS = count()


class WaitingQueue:
    """A heap, by arrival if not told otherwise.

    The entry of a sequence that leaves from the middle is dropped when it comes to the top.
    """

    __slots__ = ("_entries", "_heap", "_order")

    def __init__(self, order: Order = by_arrival) -> None:
        self._order = order
        self._heap: list[Entry] = []
        self._entries: dict[RequestId, Entry] = {}  # the valid entries; the heap may have others

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order; for explanations and checks."""
        return (sequence for _, _, sequence in self._entries.values())

    def push(self, sequence: Sequence) -> None:
        entry = (self._order(sequence), next(_NUMBERS), sequence)
        self._entries[sequence.request_id] = entry
        heapq.heappush(self._heap, entry)

    def first(self) -> Sequence | None:
        """The first sequence; it stays in the queue."""
        self._clear_top()
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence.request_id]
        if len(self._heap) > MOST_LEFT_BEHIND + 2 * len(self._entries):
            # While the first sequence stays, entries behind it never come to the top, and keep prompts in memory.
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        # At once: entries that pile up would all be dropped in one pass later.
        self._clear_top()

    def _clear_top(self) -> None:
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][2].request_id) is not heap[0]:
            heapq.heappop(heap)
