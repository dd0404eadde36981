"""A lazy heap knows the first of many keys, whichever come, leave and change their place."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Order = tuple[Any, ...]
# The number keeps keys from being compared: of equal orders, the one that came first is first.
Entry = tuple[Order, int, Key]

# Entries that no longer hold are cleared away when they are more than this, and more than those that hold.
MOST_LEFT_BEHIND = 64

# One for all heaps: every adapter has some, and the numbers need only grow.
_NUMBERS = count()


class LazyHeap(Generic[Key]):
    """The entry of a key that leaves, or moves, stays in the heap until it comes to the top."""

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._heap: list[Entry[Key]] = []  # its top always holds
        self._entries: dict[Key, Entry[Key]] = {}  # those that hold

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        """In no particular order."""
        return iter(self._entries)

    def first(self) -> Key | None:
        return self._heap[0][2] if self._heap else None

    def top(self) -> Entry[Key] | None:
        """The first key, with where it was put."""
        return self._heap[0] if self._heap else None

    def order_of(self, key: Key) -> Order:
        """Where a key was put that is here."""
        return self._entries[key][0]

    def put(self, key: Key, order: Order) -> None:
        """Add a key, or move it."""
        entry = self._entries[key] = (order, next(_NUMBERS), key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > len(self._entries):
            self._tidy()

    def take(self) -> Entry[Key]:
        """Take the first key out, until it is given back."""
        entry = heapq.heappop(self._heap)
        del self._entries[entry[2]]
        if len(self._heap) > len(self._entries):
            self._tidy()
        return entry

    def give_back(self, entry: Entry[Key]) -> None:
        """The key is not here meanwhile."""
        self._entries[entry[2]] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, key: Key) -> None:
        """A key that is not here is ignored."""
        if self._entries.pop(key, None):
            self._tidy()  # at once: entries that pile up would all be dropped in one pass later

    def _tidy(self) -> None:
        heap, entries = self._heap, self._entries
        if len(heap) > MOST_LEFT_BEHIND + 2 * len(entries):
            # While the first key stays, entries behind it never come to the top, and keep prompts in memory.
            heap[:] = entries.values()
            heapq.heapify(heap)
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
