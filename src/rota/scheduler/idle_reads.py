"""Idle reads bring adapters into host memory that no request has asked for yet, one at a time."""

from __future__ import annotations

from rota.core.ids import AdapterId
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group
from rota.scheduler.reads import order_idle_read


class IdleReads:
    """The adapters that were added to be read later and were never read, in the order of their adding.

    One is read while no other adapter is, and only into room that is free: no adapter leaves host memory for one that
    no request has asked for. So the disk is free for the adapters of requests, but for one read.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._unread: dict[AdapterId, Group] = {}
        self._put_off: set[AdapterId] = set()

    def expect(self, group: Group) -> None:
        """An adapter is known from now on, and is to be read."""
        self._unread[group.adapter_id] = group

    def has(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter is known, though it was never read."""
        return adapter_id in self._unread or adapter_id in self._put_off

    def put_off(self, adapter_id: AdapterId) -> None:
        """The source of an adapter is away: it is read when a request asks for it, and not for want of other work."""
        self._unread.pop(adapter_id, None)
        self._put_off.add(adapter_id)

    def forget(self, adapter_id: AdapterId) -> None:
        """An adapter was read, could not be read, or is gone."""
        self._unread.pop(adapter_id, None)
        self._put_off.discard(adapter_id)

    def order(self, draft: Draft) -> None:
        """Once a pass, after the reads that requests wait for."""
        hosts = self._books.hosts
        if self._unread and not hosts.reads and not hosts.is_full:
            group = next(iter(self._unread.values()))
            assert group.adapter is not None
            order_idle_read(self._books, draft, group.adapter)
