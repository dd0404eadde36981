"""Read-ahead orders adapters from disk that will come next, before a slot is free for them."""

from __future__ import annotations

from itertools import islice

from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group, Standing
from rota.scheduler.host_victims import HostVictims
from rota.scheduler.reads import order_read

# This many absent adapters, first due first, are to lie in host memory.
MOST_AHEAD = 8
# A disk reads one adapter after another, so an adapter that is due sooner waits for at most this many reads.
MOST_READS = 2
# Sources bring as many side by side, and the disk is free meanwhile.
MOST_FAR_READS = 4


class ReadAhead:
    """Drops an adapter only for one that is wanted sooner, so no adapter is read twice before it is used."""

    def __init__(self, books: Books, victims: HostVictims) -> None:
        self._books = books
        self._victims = victims

    def order(self, draft: Draft) -> None:
        """Once a pass, after the adapters that could come at once."""
        hosts = self._books.hosts
        for group in islice(self._books.absent, MOST_AHEAD):
            if not self._is_missing(group):
                continue
            assert group.adapter is not None
            is_far = group.adapter.is_far
            if hosts.reads_like(is_far) >= (MOST_FAR_READS if is_far else MOST_READS):
                continue
            if not hosts.lets_read(group.adapter, draft.now):
                continue
            if hosts.is_full:
                spare = self._victims.next_spare(draft.step_id, self._books.due_at(group))
                if spare is None:
                    return
                self._victims.drop(draft, spare)
            order_read(self._books, draft, group.adapter)

    def _is_missing(self, group: Group) -> bool:
        hosts, adapter_id = self._books.hosts, group.adapter_id
        return group.standing is not Standing.NEW and not hosts.has(adapter_id) and not hosts.is_fetching(adapter_id)
