"""The waiting queue holds sequences in order of arrival, however often they come back."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from rota.core.ids import RequestId
from rota.scheduler.sequence import Sequence


class WaitingQueue:
    """A heap by arrival; one that leaves from the middle is forgotten now and dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, RequestId], int, Sequence]] = []
        self._numbers = count()
        self._number_of: dict[RequestId, tuple[int, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._number_of)

    def __iter__(self) -> Iterator[Sequence]:
        """In no promised order; for explanations and checks."""
        return (sequence for _, sequence in self._number_of.values())

    def push(self, sequence: Sequence) -> None:
        number = next(self._numbers)  # tells an entry that was left behind from the one that counts
        self._number_of[sequence.request_id] = (number, sequence)
        heapq.heappush(self._heap, (sequence.arrival, number, sequence))

    def first(self) -> Sequence | None:
        """Who arrived first; stays in the queue."""
        while self._heap:
            _, number, sequence = self._heap[0]
            if self._number_of.get(sequence.request_id) == (number, sequence):
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._number_of[sequence.request_id]
