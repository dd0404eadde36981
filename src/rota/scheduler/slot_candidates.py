"""Slot candidates are the residents that may leave their slot, and the absent adapters that may come into one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rota.core.ids import AdapterId
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.due_queue import DueQueue
from rota.scheduler.group import Group

# Copies into slots of busy residents that may be under way at a time: each takes a slot out of one step.
MOST_COPIES = 2
# The time of a step is not known before the first step.
LEAST_STEP_S = 0.001
# A pass looks at no more claimants than this, however many a policy asks for.
MOST_CLAIMANTS = 64


class SlotCandidates:
    """What a slot policy sees (`policy.views.SlotsView`); only here are pins and copies under way considered."""

    def __init__(self, books: Books, admission: Admission, is_overlapped: bool) -> None:
        self._books = books
        self._admission = admission
        self._is_overlapped = is_overlapped

    @property
    def absent(self) -> DueQueue:
        return self._books.absent

    @property
    def step_s(self) -> float:
        return max(self._books.step_s, LEAST_STEP_S)

    @property
    def total(self) -> int:
        return self._books.slots.total

    @property
    def step_tokens(self) -> int:
        return self._books.step_tokens

    @property
    def has_priorities(self) -> bool:
        return len(self._books.priorities) > 1

    @property
    def oldest(self) -> DueQueue:
        return self._books.absent.oldest

    @property
    def largest(self) -> DueQueue:
        return self._books.absent.largest

    @property
    def newcomers(self) -> DueQueue:
        return self._books.absent.newcomers

    @property
    def parked(self) -> DueQueue:
        return self._books.absent.stalest

    @property
    def blocks(self) -> int:
        return self._books.blocks.total

    @property
    def free_blocks(self) -> int:
        return self._books.blocks.free

    @property
    def adapter_blocks(self) -> int:
        return self._books.adapter_blocks

    def blocks_to_start(self, adapter_id: AdapterId) -> int:
        first = self._books.groups[adapter_id].queue.first()
        return self._books.blocks.blocks_for(len(first.tokens)) if first else 0

    def view_of(self, adapter_id: AdapterId) -> Group | None:
        return self._books.groups.get(adapter_id)

    # ── who may leave ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def residents(self) -> list[Group]:
        return self._books.residents

    @property
    def free(self) -> int:
        slots = self._books.slots
        return max(0, slots.empty + len(self.idle()) - slots.surplus)

    @property
    def surplus(self) -> int:
        return self._books.slots.surplus

    @property
    def copies(self) -> int:
        slots = self._books.slots
        return MOST_COPIES - len(slots.on_their_way) if self._is_overlapped else slots.total

    def idle(self) -> list[Group]:
        """Residents without a running sequence: they can leave and no answer stops."""
        return [group for group in self._books.residents if not group.running and self.may_leave(group.adapter_id)]

    def may_leave(self, adapter_id: AdapterId) -> bool:
        group, slots = self._books.groups[adapter_id], self._books.slots
        if group.is_pinned:
            return False
        if self._keeps_its_share(group):
            return False
        return slots.residencies[adapter_id].has_run or not self._admission.can_work(group)

    def _keeps_its_share(self, group: Group) -> bool:
        """Is it the only busy adapter of its tenant? Then no other tenant takes its slot.

        While there are more residents than open slots, any of them may have to leave.
        """
        if not self._books.accounts.are_shared or self._books.slots.surplus:
            return False
        account = group.main_account
        if account is None or len(account.adapters) > 1:
            return False
        return self._books.accounts.share(account, self._books.slots.total) >= 1.0

    # ── who may come ─────────────────────────────────────────────────────────────────────────────────────────────

    def can_start(self, adapter_id: AdapterId) -> bool:
        first = self._books.groups[adapter_id].queue.first()
        return first is not None and self._admission.has_room(first)

    def is_at_hand(self, adapter_id: AdapterId) -> bool:
        """Do the adapter's weights lie in host memory, from where they can be copied into a slot?"""
        return self._books.hosts.has(adapter_id)

    def is_being_read(self, adapter_id: AdapterId) -> bool:
        return self._books.hosts.is_fetching(adapter_id)

    def at_hand(self) -> Iterator[Group]:
        """Absent adapters whose weights lie in host memory, first due first."""
        return iter(self._books.absent.at_hand)

    def claimants(self) -> Iterator[Group]:
        """As `at_hand`, but only adapters that could run, and no more of them than a policy needs to choose among."""
        return islice(self._able(), MOST_CLAIMANTS)

    def _able(self) -> Iterator[Group]:
        """After a few adapters that lack KV, only adapters that hold KV."""
        books, lacking = self._books, 0
        for group in self.at_hand():
            if self._admission.can_work(group):
                yield group
            elif (lacking := lacking + 1) == LOOK_AHEAD:
                behind = books.absent.parked.later_than(books.due_at(group), group.adapter_id)
                yield from (one for one in islice(behind, MOST_CLAIMANTS) if self.is_at_hand(one.adapter_id))
                return
