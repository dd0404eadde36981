"""Counting tells how many requests wait and run, of some adapters one by one and of all others in sum."""

from __future__ import annotations

from collections.abc import Collection

from rota.core.events import AdapterStanding
from rota.core.ids import BASE, AdapterId
from rota.scheduler.books import Books
from rota.scheduler.group import Group

Summed = tuple[tuple[AdapterStanding, ...], AdapterStanding | None, tuple[AdapterId, ...]]


def counted(books: Books, group: Group) -> AdapterStanding:
    """The requests of one adapter, without the reason why the first of them waits."""
    first = group.queue.first()
    running = group.rows if books.is_open(group) else 0
    return AdapterStanding(
        adapter_id=group.adapter_id,
        waiting=group.waiting,
        running=running,
        parked=group.running - running,
        oldest_at=first.request.arrived_at if first else None,
        reason="",
    )


def summed(books: Books, only: Collection[AdapterId]) -> Summed:
    """The adapters of `only` and the base model, all others in sum, and the adapters that have work and no slot.

    Walks through the residents and `only`, and never through all adapters.
    """
    groups = [books.base, *(group for one in only if one != BASE and (group := books.groups.get(one)))]
    told = tuple(counted(books, group) for group in groups)
    running = sum(group.rows for group in books.open_groups) - sum(one.running for one in told)
    holding = books.running_count - sum(one.running + one.parked for one in told)
    others = AdapterStanding(
        adapter_id=BASE,
        waiting=books.waiting - sum(one.waiting for one in told),
        running=running,
        parked=holding - running,
        oldest_at=_oldest_at(books, {one.adapter_id for one in told}),
        reason="",
    )
    return told, others, tuple(group.adapter_id for group in books.absent)


def _oldest_at(books: Books, told: Collection[AdapterId]) -> float | None:
    """Since when a request of another adapter waits."""
    rest = (group.queue.first() for group in books.open_groups if group.adapter_id not in told)
    found = [first.request.arrived_at for first in rest if first]
    for group in books.absent.oldest:
        if group.adapter_id not in told and (first := group.queue.first()):
            found.append(first.request.arrived_at)
            break
    return min(found, default=None)
