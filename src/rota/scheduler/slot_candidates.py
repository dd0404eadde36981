"""Slot candidates are the tenants that may leave their slot, and the absent adapters that may come into one."""

from __future__ import annotations

from collections.abc import Iterator

from rota.core.ids import AdapterId
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.due_queue import DueQueue
from rota.scheduler.fetching import Fetching
from rota.scheduler.group import Group, Standing


class SlotCandidates:
    """What a slot policy sees (`policy.views.SlotsView`); pins and loads in flight are counted here, and only here."""

    def __init__(self, books: Books, admission: Admission, fetching: Fetching, is_overlapped: bool) -> None:
        self._books = books
        self._admission = admission
        self._fetching = fetching
        self._is_overlapped = is_overlapped
        self.draft = Draft(0, 0.0, 0)  # of this pass

    @property
    def absent(self) -> DueQueue:
        return self._books.absent

    @property
    def step_s(self) -> float:
        return self._books.step_s

    @property
    def has_priorities(self) -> bool:
        return len(self._books.priorities) > 1

    # ── who may leave ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def tenants(self) -> list[Group]:
        return self._books.tenants

    @property
    def free(self) -> int:
        return self._books.slots.empty + len(self.idle())

    @property
    def landings(self) -> int:
        slots = self._books.slots
        return slots.landings if self._is_overlapped else slots.total

    def idle(self) -> list[Group]:
        """Tenants of which nothing runs: they can leave and disturb no answer."""
        return [group for group in self._books.tenants if not group.running and self.may_leave(group.adapter_id)]

    def may_leave(self, adapter_id: AdapterId) -> bool:
        group, slots = self._books.groups[adapter_id], self._books.slots
        if group.is_pinned or slots.is_replaced(adapter_id):
            return False
        return slots.tenancies[adapter_id].has_run or not self._admission.can_work(group)

    # ── who may come ─────────────────────────────────────────────────────────────────────────────────────────────

    def can_start(self, adapter_id: AdapterId) -> bool:
        first = self._books.groups[adapter_id].queue.first()
        return first is not None and self._admission.has_room(first)

    def is_at_hand(self, group: Group) -> bool:
        return self._fetching.is_at_hand(self.draft, group)

    def at_hand(self) -> Iterator[Group]:
        """Whose weights lie in host memory, first due first; the others are fetched while there is room for them."""
        books, refused = self._books, 0
        for group in books.absent:
            if self.is_at_hand(group):
                yield group
            elif group.standing is not Standing.NEW and not books.hosts.is_fetching(group.adapter_id):
                refused += 1
            if refused == LOOK_AHEAD:
                # Of a thousand behind them only those are worth a look that are there, or need no KV any more.
                near = {*books.hosts.held, *(parked.adapter_id for parked in books.parked)}
                behind = books.absent.later_among(near, books.due_at(group), group.adapter_id)
                yield from (one for one in behind if self.is_at_hand(one))
                return

    def claimants(self) -> Iterator[Group]:
        """Who lacks nothing but a slot, first due first; after a few who lack KV too, only those who hold some."""
        books, lacking = self._books, 0
        for group in self.at_hand():
            if self._admission.can_work(group):
                yield group
            elif (lacking := lacking + 1) == LOOK_AHEAD:
                behind = books.parked.later_than(books.due_at(group), group.adapter_id)
                yield from (one for one in behind if self.is_at_hand(one))
                return
