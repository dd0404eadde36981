"""Warm-ups bring a new version of an adapter into a slot before its name means it."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.events import SlotReason
from rota.core.ids import AdapterId
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.moves import Moves, vacate
from rota.scheduler.slot_candidates import SlotCandidates


class WarmUps:
    """A version gets an empty slot, or that of an adapter without requests, if no absent adapter could use it.

    Else its client is answered without one: no adapter waits longer for an update, but for the one copy that may be
    under way.
    """

    def __init__(self, books: Books, candidates: SlotCandidates, moves: Moves) -> None:
        self._books = books
        self._candidates = candidates
        self._moves = moves
        self._former: dict[AdapterId, AdapterId] = {}  # of versions that are being read or wait, whose place they take
        self._waiting: dict[AdapterId, Group] = {}  # they lie in host memory
        self._copied: AdapterId | None = None  # whose copy is under way

    def expect(self, group: Group, former: AdapterId) -> None:
        """A version is being read that will take the place of a former one."""
        self._former[group.adapter_id] = former

    def begin(self, group: Group) -> bool:
        """A version lies in host memory; False if no place was promised to it."""
        if group.adapter_id not in self._former or group.is_leaving:
            return False
        self._waiting[group.adapter_id] = group
        return True

    def forget(self, adapter_id: AdapterId) -> None:
        """A version has its place, or needs none."""
        self._former.pop(adapter_id, None)
        self._waiting.pop(adapter_id, None)
        if self._copied == adapter_id:
            self._copied = None

    def order(self, draft: Draft, answer: Callable[[Group, float], None]) -> None:
        """Once a pass, behind the turns. `answer` is called for versions that get no slot, or need no copy.

        One copy at a time, so that copies for requests wait for one at most.
        """
        while self._waiting and self._copied is None:
            group = next(iter(self._waiting.values()))
            self._move_in(draft, group)
            residency = self._books.slots.residencies.get(group.adapter_id)
            if residency is None or residency.is_ready:
                self.forget(group.adapter_id)
                answer(group, draft.now)
                draft.ask_again(draft.now)  # the turns of this pass are over, and requests may wait for this version
            else:
                del self._waiting[group.adapter_id]
                self._copied = group.adapter_id

    def _move_in(self, draft: Draft, group: Group) -> None:
        books = self._books
        is_there = group.adapter_id in books.slots.residencies
        if is_there or group.is_leaving or not books.hosts.has(group.adapter_id):
            return
        unused = [one.adapter_id for one in self._candidates.idle() if not one.users]
        if books.slots.surplus or books.slots.empty + len(unused) <= len(books.absent):
            return
        if not books.slots.empty:
            former = self._former[group.adapter_id]
            leaver = former if former in unused else books.slots.first_to_leave(unused)
            vacate(books, books.groups[leaver], draft.now, SlotReason.IDLE)
        self._moves.move_in(draft, group, SlotReason.NEW_VERSION)
