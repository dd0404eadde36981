"""The page ledger knows which pages of the slots' memory are free, and how many slots the known adapters leave open."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from rota.core.ids import AdapterId


class PageLedger:
    """So many slots are open as the largest known adapters could fill together.

    Then every set of so many residents fits, whichever come and go, and no policy has to know how large adapters are.
    """

    def __init__(self, pages: int, slots: int) -> None:
        self.total = pages
        self.open = slots
        self._slots = slots
        self._free = list(range(pages))
        self._needs: dict[AdapterId, int] = {}
        self._counts: Counter[int] = Counter()  # adapters by their pages: thousands, but few different numbers

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def open_with(self, adapter_id: AdapterId, pages: int) -> int:
        """How many slots would be open if an adapter took so many pages."""
        before = self._needs.get(adapter_id, 0)
        self._count(before, pages)
        found = self._find_open()
        self._count(pages, before)
        return found

    def know(self, adapter_id: AdapterId, pages: int) -> None:
        """An adapter takes so many pages in a slot."""
        self._count(self._needs.get(adapter_id, 0), pages)
        self._needs[adapter_id] = pages
        self.open = self._find_open()

    def forget(self, adapter_id: AdapterId) -> None:
        self._count(self._needs.pop(adapter_id, 0), 0)
        self.open = self._find_open()

    def take(self, adapter_id: AdapterId) -> tuple[int, ...]:
        """The pages for an adapter's ranks, in their order; the lowest ones, so that a rerun takes the same."""
        return tuple(heapq.heappop(self._free) for _ in range(self._needs.get(adapter_id, 0)))

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)

    def check(self, held: dict[AdapterId, tuple[int, ...]]) -> None:
        taken = [page for pages in held.values() for page in pages]
        assert sorted([*taken, *self._free]) == list(range(self.total)), "a page is lost or shared"
        assert all(len(pages) == self._needs.get(one, 0) for one, pages in held.items()), "an adapter lacks a page"
        assert self._counts == Counter(filter(None, self._needs.values())), "an adapter's pages are not counted right"
        assert self.open == self._find_open()

    def _count(self, before: int, after: int) -> None:
        """One adapter takes `after` pages and not `before`; 0 stands for none that is known."""
        for pages, more in ((before, -1), (after, 1)):
            if pages:
                self._counts[pages] += more
                if not self._counts[pages]:
                    del self._counts[pages]

    def _find_open(self) -> int:
        """The largest number of slots, so that as many of the largest adapters fit into the pages together."""
        found, left = 0, self.total
        for pages in sorted(self._counts, reverse=True):
            fitting = left // pages
            if fitting < self._counts[pages]:
                return min(found + fitting, self._slots)
            found += self._counts[pages]
            left -= pages * self._counts[pages]
        return self._slots  # all of them fit
