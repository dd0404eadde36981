"""Queues hold the sequences that wait: in which order, and whose turn it is among tenants."""

from __future__ import annotations

from collections.abc import Iterator

from rota.scheduler.accounts import Account
from rota.scheduler.lazy_heap import Entry, LazyHeap
from rota.scheduler.sequence import Arrival, Sequence


def by_turn(sequence: Sequence) -> Arrival:
    """Once a sequence has its first token, being late for it counts no more."""
    return sequence.arrival if sequence.output_length else sequence.turn


def by_size(sequence: Sequence) -> tuple[int, int, Arrival]:
    """The highest priority first, and of these the shortest."""
    return (-sequence.priority, sequence.length, sequence.arrival)


# A tenant with the rank that it had when it was put into the line.
Place = Entry[Account]


class FairQueue:
    """An adapter's waiting sequences, also those that come back after a preemption.

    By arrival for the adapter as a whole, and by rank of their tenants for sequences that may start. Ranks grow with
    every step. A place in the line is corrected only when it comes to the top, so a look at the line costs the same for
    two tenants and for a thousand.
    """

    __slots__ = ("_all", "_line", "_of")  # every adapter has one, used or not

    def __init__(self) -> None:
        self._all: LazyHeap[Sequence] = LazyHeap()  # by arrival
        # By tenant, none of them empty: by turn, and the same sequences by size.
        self._of: dict[Account, tuple[LazyHeap[Sequence], LazyHeap[Sequence]]] = {}
        self._line: LazyHeap[Account] = LazyHeap()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order; for explanations and checks."""
        return iter(self._all)

    def push(self, sequence: Sequence) -> None:
        account = sequence.account
        if account not in self._of:
            self._of[account] = (LazyHeap(), LazyHeap())
            self._line.put(account, (account.rank,))
        turns, sizes = self._of[account]
        turns.put(sequence, by_turn(sequence))
        sizes.put(sequence, by_size(sequence))
        self._all.put(sequence, sequence.arrival)

    def remove(self, sequence: Sequence) -> None:
        account = sequence.account
        turns, sizes = self._of[account]
        for heap in (turns, sizes, self._all):
            heap.remove(sequence)
        if not turns:
            del self._of[account]
            self._line.remove(account)

    def move(self, sequence: Sequence) -> None:
        """The turn of a sequence among those of its tenant has changed."""
        self._of[sequence.account][0].put(sequence, by_turn(sequence))

    def first(self) -> Sequence | None:
        """The sequence that arrived first, of any tenant; it stays in the queue."""
        return self._all.first()

    def next(self) -> Sequence | None:
        """The first sequence of the tenant whose turn it is; it stays in the queue."""
        line = self._line
        while place := line.top():
            order, _, account = place
            rank = (account.rank,)
            if rank <= order:
                return self._of[account][0].first()
            line.put(account, rank)
        return None

    def shortest_of(self, account: Account) -> Sequence | None:
        """The shortest sequence of a tenant, among those of its highest priority; it stays in the queue."""
        return self._of[account][1].first() if account in self._of else None

    def pass_over(self) -> Place:
        """Let the tenants after the one whose turn it is come to the top, until the place is given back."""
        return self._line.take()

    def give_back(self, place: Place) -> None:
        """Unless the tenant has left meanwhile, or has come back to another place."""
        if place[2] in self._of and place[2] not in self._line:
            self._line.give_back(place)

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
