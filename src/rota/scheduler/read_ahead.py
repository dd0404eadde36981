"""Read-ahead orders adapters from disk that will come next, before a slot is free for them."""

from __future__ import annotations

from itertools import islice

from rota.core.ids import AdapterId
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group, Standing

# This many absent adapters, first due first, are to lie in host memory.
MOST_AHEAD = 8
# A disk reads one adapter after another, so an adapter that is due sooner waits for at most this many reads.
MOST_READS = 2


class ReadAhead:
    """Drops an adapter only for one that is wanted sooner, so no adapter is read twice before it is used."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def order(self, draft: Draft) -> None:
        """Once a pass, after the adapters that could come at once."""
        hosts = self._books.hosts
        for group in islice(self._books.absent, MOST_AHEAD):
            if not self._is_missing(group):
                continue
            if hosts.reads >= MOST_READS:
                return
            if hosts.is_full:
                spare = self._spare(group)
                if spare is None:
                    return
                hosts.forget(spare)
                draft.drops.append(spare)
            assert group.adapter is not None
            hosts.begin_fetch(group.adapter_id)
            draft.fetches.append(group.adapter)

    def _is_missing(self, group: Group) -> bool:
        hosts, adapter_id = self._books.hosts, group.adapter_id
        return group.standing is not Standing.NEW and not hosts.has(adapter_id) and not hosts.is_fetching(adapter_id)

    def _spare(self, wanted: Group) -> AdapterId | None:
        """An adapter that host memory can do without for `wanted`: one without requests, or else the last one due."""
        books, last, last_due_at = self._books, None, self._books.due_at(wanted)
        for adapter_id in books.hosts.held:
            group, residency = books.groups[adapter_id], books.slots.residencies.get(adapter_id)
            if residency and not residency.is_ready:
                continue  # it is being copied from host memory
            if not group.users:
                return adapter_id
            # A resident, or an adapter with parked sequences, may be back before a read has ended.
            if not residency and not group.running and (due_at := books.due_at(group)) > last_due_at:
                last, last_due_at = adapter_id, due_at
        return last
