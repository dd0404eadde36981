"""Reads bring adapters into host memory, and tell observers what lies there."""

from __future__ import annotations

from rota.core.adapter import Adapter
from rota.core.events import HostChanged, HostState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft


def order_read(books: Books, draft: Draft, adapter: Adapter) -> None:
    """An adapter will be read from disk with the next step; the caller has made room."""
    draft.fetches.append(adapter)
    _begin_read(books, draft, adapter)


def order_idle_read(books: Books, draft: Draft, adapter: Adapter) -> None:
    """The same for an adapter that no request waits for."""
    draft.idle_fetches.append(adapter)
    _begin_read(books, draft, adapter)


def finish_read(books: Books, fetched: AdapterFetched) -> None:
    """An adapter lies in host memory."""
    books.hosts.finish_fetch(fetched.adapter_id)
    _tell(books, fetched.adapter_id, HostState.HELD, fetched.at, fetched.size_bytes, fetched.seals)


def forget_copy(books: Books, adapter_id: AdapterId, at: float) -> None:
    """An adapter is no longer in host memory, nor on its way there."""
    if books.hosts.has(adapter_id) or books.hosts.is_fetching(adapter_id):
        _tell(books, adapter_id, HostState.GONE, at)
    books.hosts.forget(adapter_id)


def _begin_read(books: Books, draft: Draft, adapter: Adapter) -> None:
    books.hosts.begin_fetch(adapter, draft.now)
    _tell(books, adapter.adapter_id, HostState.READING, draft.now)


def _tell(
    books: Books,
    adapter_id: AdapterId,
    state: HostState,
    at: float,
    size_bytes: int = 0,
    seals: tuple[str, ...] = (),
) -> None:
    books.outbox.append(
        HostChanged(
            at=at,
            adapter_id=adapter_id,
            state=state,
            engine_id=books.engine_id,
            size_bytes=size_bytes,
            seals=seals,
        )
    )
