"""The slot ledger knows which adapter sits in which slot of the device, and whether its weights have arrived.

A slot is a place on the device, and there is no other place: an adapter that comes is copied to where another adapter
leaves, while the rest run. If slots share pages, an adapter takes as many of these as its rank needs. While those that
are in slots and those that want one do not all fit together, some slots are closed: then there are fewer places than
slots. Places for whole matrices are shared in the same way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rota.core.ids import AdapterId, Slot
from rota.policy.eviction import Eviction

# ── pages ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The page ledger knows which pages of the slots' memory are free, and how many slots that leaves open.


class PageNeeds:
    """Adapters by the pages that they take. As many slots are open as the largest of them fit into the pages together.

    Then every set of so many of them fits, whichever come and go, and no policy has to know how large adapters are.
    """

    def __init__(self, pages: int, slots: int) -> None:
        self._pages = pages
        self._slots = slots
        self._counts: Counter[int] = Counter()  # thousands of adapters, but few different numbers
        self.open = slots

    def change(self, before: int, after: int) -> None:
        """One adapter takes `after` pages and not `before`; 0 stands for none that is counted."""
        if before != after:
            self._count(before, after)
            self.open = self._find_open()

    def open_with(self, before: int, after: int) -> int:
        """How many slots would be open after such a change."""
        self._count(before, after)
        found = self._find_open()
        self._count(after, before)
        return found

    def _count(self, before: int, after: int) -> None:
        for pages, more in ((before, -1), (after, 1)):
            if pages:
                self._counts[pages] += more
                if not self._counts[pages]:
                    del self._counts[pages]

    def _find_open(self) -> int:
        found, left = 0, self._pages
        for pages in sorted(self._counts, reverse=True):
            fitting = left // pages
            if fitting < self._counts[pages]:
                return min(found + fitting, self._slots)
            found += self._counts[pages]
            left -= pages * self._counts[pages]
        return self._slots  # all of them fit


class PageLedger:
    """Slots are open by those adapters that are in one or want one. By all that are known, fewer might be."""

    def __init__(self, pages: int, slots: int) -> None:
        self.total = pages
        self._free = list(range(pages))
        self._needs: dict[AdapterId, int] = {}
        self._known, self._there = PageNeeds(pages, slots), PageNeeds(pages, slots)
        self._are_there: set[AdapterId] = set()

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def open(self) -> int:
        return self._there.open

    @property
    def least(self) -> int:
        """How many slots are open at least, whichever of the known adapters want one."""
        return self._known.open

    def least_with(self, adapter_id: AdapterId, pages: int) -> int:
        """How many that would be if an adapter took so many pages."""
        return self._known.open_with(self._needs.get(adapter_id, 0), pages)

    def know(self, adapter_id: AdapterId, pages: int) -> None:
        """An adapter takes so many pages in a slot."""
        before = self._needs.get(adapter_id, 0)
        self._known.change(before, pages)
        if adapter_id in self._are_there:
            self._there.change(before, pages)
        self._needs[adapter_id] = pages

    def note(self, adapter_id: AdapterId, is_there: bool) -> None:
        """An adapter is in a slot or wants one, or neither."""
        if is_there == (adapter_id in self._are_there):
            return
        pages = self._needs.get(adapter_id, 0)
        if is_there:
            self._are_there.add(adapter_id)
            self._there.change(0, pages)
        else:
            self._are_there.remove(adapter_id)
            self._there.change(pages, 0)

    def forget(self, adapter_id: AdapterId) -> None:
        self.note(adapter_id, is_there=False)
        self._known.change(self._needs.pop(adapter_id, 0), 0)

    def take(self, adapter_id: AdapterId) -> tuple[int, ...]:
        """The pages for an adapter's ranks, in their order; the lowest ones, so that a rerun takes the same."""
        return tuple(heapq.heappop(self._free) for _ in range(self._needs.get(adapter_id, 0)))

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)


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
        # The open slots: others are closed while adapters that are there take many pages or matrices.
        self.total = slots
        self.pages = PageLedger(pages, slots) if pages else None
        self.matrices = PageLedger(matrices, slots)
        self._empty = [Slot(slot) for slot in range(slots)]
        self._residencies: dict[AdapterId, Residency] = {}
        # Adapters whose copies are not known to be complete, in the order of the copies.
        self._on_their_way: dict[AdapterId, None] = {}
        self._wanting: set[AdapterId] = set()  # adapters that could come now, and have work or will have
        self._eviction = eviction

    @property
    def least(self) -> int:
        """How many slots are open at least, whichever of the known adapters want one."""
        return min(self.matrices.least, self.pages.least if self.pages else self.most)

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
        self._wanting.discard(adapter_id)
        if self.pages:
            self.pages.forget(adapter_id)
        self.matrices.forget(adapter_id)
        self._count_open()

    def want(self, adapter_id: AdapterId, is_wanting: bool = True) -> None:
        """An adapter that is in host memory wants a slot, or not any more; slots may close or open with that."""
        if is_wanting != (adapter_id in self._wanting):
            self._wanting ^= {adapter_id}
            self._note(adapter_id)

    def _note(self, adapter_id: AdapterId) -> None:
        is_there = adapter_id in self._residencies or adapter_id in self._wanting
        if self.pages:
            self.pages.note(adapter_id, is_there)
        self.matrices.note(adapter_id, is_there)
        self._count_open()

    def _count_open(self) -> None:
        self.total = min(self.matrices.open, self.pages.open if self.pages else self.most)

    def begin_load(self, adapter_id: AdapterId) -> Residency:
        self.want(adapter_id)
        assert self.empty, "no slot is empty"
        pages = self.pages.take(adapter_id) if self.pages else ()
        slot, matrices = heapq.heappop(self._empty), self.matrices.take(adapter_id)
        residency = self._residencies[adapter_id] = Residency(slot=slot, pages=pages, matrices=matrices)
        self._on_their_way[adapter_id] = None
        self._eviction.use(adapter_id)
        self.want(adapter_id, is_wanting=False)
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
        self._note(adapter_id)
        return residency.slot

    def first_to_leave(self, candidates: list[AdapterId]) -> AdapterId:
        return self._eviction.choose(candidates)
