"""Queues hold the sequences that wait: in which order, and whose turn it is among tenants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from rota.core.ids import RequestId
from rota.scheduler.accounts import Account
from rota.scheduler.sequence import Arrival, Sequence

# ── queue ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The waiting queue holds sequences by arrival or by size, also those that come back after a preemption.

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


# ── fair queue ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The fair queue holds an adapter's waiting sequences, and knows whose turn it is among their tenants.

# The rank that the tenant had when it was put into the line; the number keeps accounts from being compared.
Place = tuple[float, int, Account, WaitingQueue]


_LINE_NUMBERS = count()


class FairQueue:
    """By arrival for the adapter as a whole, and by rank of their tenants for sequences that may start.

    Ranks grow with every step. A place in the line is corrected only when it comes to the top, so a look at the line
    costs the same for two tenants and for a thousand.
    """

    __slots__ = ("_all", "_line", "_of", "_sizes")  # every adapter has one, used or not

    def __init__(self) -> None:
        self._all = WaitingQueue()
        self._of: dict[str, WaitingQueue] = {}  # by the tenant's name; none is empty
        self._sizes: dict[str, WaitingQueue] = {}  # the same sequences, by size
        self._line: list[Place] = []  # a heap; it may hold places of tenants that have nothing here any more

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order; for explanations and checks."""
        return iter(self._all)

    def push(self, sequence: Sequence) -> None:
        account = sequence.account
        queue = self._of.get(account.name)
        if queue is None:
            queue = self._of[account.name] = WaitingQueue(by_turn)
            self._sizes[account.name] = WaitingQueue(by_size)
            self._clear_away()
            heapq.heappush(self._line, (account.rank, next(_LINE_NUMBERS), account, queue))
        queue.push(sequence)
        self._sizes[account.name].push(sequence)
        self._all.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._of[sequence.account.name]
        queue.remove(sequence)
        self._sizes[sequence.account.name].remove(sequence)
        self._all.remove(sequence)
        if not queue:
            del self._of[sequence.account.name], self._sizes[sequence.account.name]

    def move(self, sequence: Sequence) -> None:
        """The turn of a sequence among those of its tenant has changed."""
        queue = self._of[sequence.account.name]
        queue.remove(sequence)
        queue.push(sequence)

    def first(self) -> Sequence | None:
        """The sequence that arrived first, of any tenant; it stays in the queue."""
        return self._all.first()

    def next(self) -> Sequence | None:
        """The first sequence of the tenant whose turn it is; it stays in the queue."""
        line = self._line
        while line:
            rank, _, account, queue = line[0]
            if self._of.get(account.name) is not queue:
                heapq.heappop(line)
            elif account.rank > rank:
                heapq.heapreplace(line, (account.rank, next(_LINE_NUMBERS), account, queue))
            else:
                return queue.first()
        return None

    def shortest_of(self, account: Account) -> Sequence | None:
        """The shortest sequence of a tenant, among those of its highest priority; it stays in the queue."""
        sizes = self._sizes.get(account.name)
        return sizes.first() if sizes else None

    def pass_over(self) -> Place:
        """Let the tenants after the one whose turn it is come to the top, until the place is given back."""
        return heapq.heappop(self._line)

    def give_back(self, place: Place) -> None:
        heapq.heappush(self._line, place)

    def in_turn(self, most: int) -> Iterator[Sequence]:
        """The first sequences of up to `most` tenants, by whose turn it is."""
        passed: list[Place] = []
        try:
            while len(passed) < most and (sequence := self.next()):
                passed.append(self.pass_over())
                yield sequence
        finally:
            for place in passed:
                self.give_back(place)

    def _clear_away(self) -> None:
        if len(self._line) > MOST_LEFT_BEHIND + 2 * len(self._of):
            # While the tenant at the top stays there, places that are left behind never come to the top.
            self._line = [place for place in self._line if self._of.get(place[2].name) is place[3]]
            heapq.heapify(self._line)
