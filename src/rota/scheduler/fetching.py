"""Fetching orders adapters from disk into host memory, and drops another adapter if host memory is full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from rota.core.ids import AdapterId
from rota.scheduler.admission import LOOK_AHEAD, Admission
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group, Standing
from rota.scheduler.host_victims import FIRST, HostVictims, WantedAt
from rota.scheduler.read_ahead import ReadAhead
from rota.scheduler.reads import order_read

# In a pass, behind the adapters that a policy names, this many are looked at to find some that should be read. This
# many of all are tried.
MOST_LOOKS, MOST_READS = 64, 8


class Fetching:
    """Only an adapter whose weights lie in host memory can be copied into a slot."""

    def __init__(self, books: Books, admission: Admission, keeps_running: bool = False) -> None:
        self._books = books
        self._admission = admission
        self._victims = HostVictims(books, self._wanted_at, keeps_running)
        self._ahead = ReadAhead(books, self._victims)
        self._first: frozenset[AdapterId] = frozenset()

    def order(self, draft: Draft, first: list[AdapterId]) -> None:
        """Once a pass: order the adapters that would come next if they were in host memory."""
        if self._books.hosts.known == len(self._books.groups) - 1:
            return  # every adapter is in host memory, or on its way there
        no_room_from: WantedAt | None = None
        self._first = frozenset(first)
        for group in islice(filter(self._is_missing, self._next_in_line(first)), MOST_READS):
            # If an adapter that is wanted sooner found no room, an adapter that is wanted later finds none either.
            wanted_at = self._wanted_at(group)
            if (no_room_from is None or wanted_at < no_room_from) and not self.try_fetch(draft, group):
                no_room_from = wanted_at
        self._ahead.order(draft)

    def try_fetch(self, draft: Draft, group: Group) -> bool:
        """Order an adapter into host memory, and drop another if it is full.

        False if no other can be dropped, or if it must not be read beside those that are being read.
        """
        hosts = self._books.hosts
        assert group.adapter is not None
        if not hosts.lets_read(group.adapter, draft.now):
            return False
        if hosts.is_full:
            victim = self._victims.next(draft.step_id, self._wanted_at(group), self._first)
            if victim is None:
                return False
            self._victims.drop(draft, victim)
        order_read(self._books, draft, group.adapter)
        return True

    def _next_in_line(self, first: list[AdapterId]) -> Iterator[Group]:
        """Adapters that the policy names, then absent ones, first due first, up to the first that could come now."""
        books = self._books
        yield from (books.groups[adapter_id] for adapter_id in first if adapter_id in books.absent)
        yield from islice(self._first_due(), MOST_LOOKS)

    def _first_due(self) -> Iterator[Group]:
        books, passed_over = self._books, 0
        for group in books.absent:
            if books.hosts.has(group.adapter_id) and self._admission.can_work(group):
                return
            yield group
            passed_over += not books.hosts.is_fetching(group.adapter_id)
            if passed_over == LOOK_AHEAD:
                yield from self._parked_behind(group)
                return

    def _parked_behind(self, group: Group) -> Iterator[Group]:
        """Of a thousand adapters behind `group`, only parked ones are worth a look: they hold KV already."""
        for parked in self._books.absent.parked.later_than(self._books.due_at(group), group.adapter_id):
            if self._books.hosts.has(parked.adapter_id):
                return
            yield parked

    def _is_missing(self, group: Group) -> bool:
        """Neither in host memory nor on its way there; a new adapter is first read when it is added."""
        hosts, adapter_id = self._books.hosts, group.adapter_id
        return group.standing is not Standing.NEW and not hosts.has(adapter_id) and not hosts.is_fetching(adapter_id)

    def _wanted_at(self, group: Group) -> WantedAt:
        """When an adapter without a slot will be copied into one; after all others if it could not run there."""
        if group.standing is Standing.NEW:
            return (False, -math.inf)  # the client that adds an adapter waits to be told that it can be read
        if group.adapter_id in self._first:
            return FIRST
        return (not self._admission.can_work(group), self._books.due_at(group))
