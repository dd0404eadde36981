"""The slot ledger knows which adapter sits in which slot of the device, and whether its weights have arrived.

A slot is a place on the device, and there is no other place: an adapter that comes is copied to where another adapter
leaves, while the rest run. If slots share pages, an adapter takes as many of these as its rank needs, and some slots
may be closed: then there are fewer places than slots. Places for whole matrices are shared in the same way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rota.core.ids import AdapterId, Slot
from rota.policy.eviction import Eviction

# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The page ledger knows which pages of the slots' memory are free, and how many slots the known adapters leave open.


class PageLedger:
    """The number of open slots is the largest for which the largest known adapters fit into the pages together.

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


@dataclass(slots=True, kw_only=True)
class Residency:
    """An adapter in a slot: it is loading until its copy is known to be complete, and ready from then on."""

    slot: Slot
    pages: tuple[int, ...] = ()  # of the slots' memory; empty if slots share none
    matrices: tuple[int, ...] = ()  # places of an embedding or a head of its own
    is_ready: bool = False
    has_run: bool = False


class SlotLedger:
    """An adapter's state follows from its residency: none, loading, or ready."""

    def __init__(self, slots: int, eviction: Eviction, pages: int = 0, matrices: int = 0) -> None:
        """`pages` and `matrices` are shared by the slots; 0 pages: every slot holds any rank."""
        self.most = slots
        # The open slots: others are closed while adapters are known that take many pages or matrices.
        self.total = slots
        self.pages = PageLedger(pages, slots) if pages else None
        self.matrices = PageLedger(matrices, slots)
        self._empty = [Slot(slot) for slot in range(slots)]
        self._residencies: dict[AdapterId, Residency] = {}
        # Adapters whose copies are not known to be complete, in the order of the copies.
        self._on_their_way: dict[AdapterId, None] = {}
        self._eviction = eviction
        self._count_open()

    def _count_open(self) -> None:
        self.total = min(self.matrices.open, self.pages.open if self.pages else self.most)

    @property
    def empty(self) -> int:
        """Open slots without a resident, and without an adapter that is on its way."""
        return max(0, self.total - len(self._residencies))

    @property
    def surplus(self) -> int:
        """How many residents there are more than open slots: so many leave before another adapter can come."""
        return max(0, len(self._residencies) - self.total)

    @property
    def on_their_way(self) -> list[AdapterId]:
        """Adapters whose copies are not known to be complete, in the order of the copies."""
        return [*self._on_their_way]

    @property
    def residencies(self) -> dict[AdapterId, Residency]:
        """By adapter, in the order of their arrival. For reading only."""
        return self._residencies

    def know(self, adapter_id: AdapterId, pages: int, matrices: int = 0) -> None:
        """An adapter takes so many pages and matrices; slots may close or open with that."""
        if matrices:
            self.matrices.know(adapter_id, matrices)
        if self.pages:
            self.pages.know(adapter_id, pages)
        self._count_open()

    def forget(self, adapter_id: AdapterId) -> None:
        """An adapter is gone, and the slots that its size kept closed open."""
        if self.pages:
            self.pages.forget(adapter_id)
        self.matrices.forget(adapter_id)
        self._count_open()

    def begin_load(self, adapter_id: AdapterId) -> Residency:
        assert self.empty, "no slot is empty"
        pages = self.pages.take(adapter_id) if self.pages else ()
        slot, matrices = heapq.heappop(self._empty), self.matrices.take(adapter_id)
        residency = self._residencies[adapter_id] = Residency(slot=slot, pages=pages, matrices=matrices)
        self._on_their_way[adapter_id] = None
        self._eviction.use(adapter_id)
        return residency

    def finish_load(self, adapter_id: AdapterId) -> None:
        """The adapter's sequences may be in the next step."""
        self._residencies[adapter_id].is_ready = True
        self._on_their_way.pop(adapter_id, None)

    def use(self, adapter_id: AdapterId) -> None:
        """An adapter is used in this step."""
        self._residencies[adapter_id].has_run = True
        self._eviction.use(adapter_id)

    def vacate(self, adapter_id: AdapterId) -> Slot:
        residency = self._residencies.pop(adapter_id)
        self._on_their_way.pop(adapter_id, None)
        heapq.heappush(self._empty, residency.slot)
        if self.pages:
            self.pages.give_back(residency.pages)
        self.matrices.give_back(residency.matrices)
        self._eviction.forget(adapter_id)
        return residency.slot

    def first_to_leave(self, candidates: list[AdapterId]) -> AdapterId:
        return self._eviction.choose(candidates)
