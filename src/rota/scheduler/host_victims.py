"""Host victims are the adapters that leave host memory for others, found with bounded work in a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from rota.core.ids import AdapterId
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.reads import forget_copy

# First whether the adapter could not run yet, then when its weights will be needed.
WantedAt = tuple[bool, float]
FIRST: WantedAt = (False, -1e9)

# This many adapters in host memory, the longest unused first, are looked at to find some that no request needs there.
MOST_HELD = 256
# And this many of the adapters that are due last, if requests need all of those.
MOST_LAST = 64
# Of these, this many are asked whether they could run.
MOST_ASKED = 8


class HostVictims:
    """Idle adapters leave first, then adapters whose weights are in a slot, then those that will be wanted last."""

    def __init__(self, books: Books, wanted_at: Callable[[Group], WantedAt], keeps_running: bool = False) -> None:
        """With `keeps_running` no adapter leaves whose answers have begun: a read would pause them."""
        self._books = books
        self._keeps_running = keeps_running
        self._wanted_at = wanted_at
        self._idle: deque[AdapterId] = deque()
        self._seated: deque[AdapterId] = deque()  # their requests do not need them in host memory
        self._asked: dict[AdapterId, WantedAt] = {}
        self._found_in = 0  # the step in which these were found

    def next(self, step_id: int, wanted_at: WantedAt, first: frozenset[AdapterId]) -> AdapterId | None:
        """The adapter that leaves for one that is wanted at this time; None if all others are wanted sooner.

        The adapters in `first` are wanted before any others. They leave for a new adapter only.
        """
        self._find(step_id)
        if spare := self._idle or self._seated:
            return spare[0]
        kept: AdapterId | None = None
        for group in self._last():
            if self._keeps_running and group.running:
                continue
            if group.adapter_id in first:
                kept = kept or group.adapter_id
                continue
            if group.adapter_id not in self._asked:
                if len(self._asked) == MOST_ASKED:
                    break
                self._asked[group.adapter_id] = self._wanted_at(group)
            if self._asked[group.adapter_id] > wanted_at:
                return group.adapter_id
        return kept if wanted_at < FIRST else None

    def next_spare(self, step_id: int, due_at: float) -> AdapterId | None:
        """The adapter that leaves for one that is due at this time, and does not need a slot yet."""
        self._find(step_id)
        if self._idle:
            return self._idle[0]
        # An adapter with parked sequences may be back before a read has ended; so may one that has a slot.
        last = next((group for group in self._last() if not group.running), None)
        return last.adapter_id if last and self._books.due_at(last) > due_at else None

    def drop(self, draft: Draft, victim: AdapterId) -> None:
        """An adapter that was found leaves host memory."""
        books = self._books
        for found in (self._idle, self._seated):
            if found and found[0] == victim:
                found.popleft()
        forget_copy(books, victim, draft.now)
        books.note_users(books.groups[victim])
        draft.drops.append(victim)

    def _last(self) -> list[Group]:
        """Adapters in host memory that have requests and no slot, due last first."""
        return self._books.absent.at_hand.last(MOST_LAST)

    def _find(self, step_id: int) -> None:
        if self._found_in == step_id:
            return
        books, self._found_in = self._books, step_id
        self._idle, self._seated, self._asked = deque(), deque(), {}
        idle_in_slots: list[AdapterId] = []  # requests may come for them that must not wait for a read later
        for adapter_id in islice(books.hosts.held, MOST_HELD):
            residency = books.slots.residencies.get(adapter_id)
            if residency and not residency.is_ready:
                continue  # it is being copied from host memory
            group = books.groups[adapter_id]
            if group.users:
                if residency and not self._keeps_running:
                    self._seated.append(adapter_id)
            elif residency or not group.wants_slot:  # else it is pinned, and would only be read again for its slot
                (idle_in_slots if residency and self._keeps_running else self._idle).append(adapter_id)
        if not books.absent.at_hand and not books.hosts.reads:
            # No adapter will come that takes a slot from one of these. Unless one is dropped, no other is ever read.
            self._idle.extend(idle_in_slots[:1])
