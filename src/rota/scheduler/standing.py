"""Standings read from the books why a request waits and how every adapter stands, and change nothing."""

from __future__ import annotations

from rota.core.events import AdapterStanding, Explained, Inspected, Whereabouts
from rota.core.ids import RequestId
from rota.scheduler.books import Books
from rota.scheduler.group import Group
from rota.scheduler.reasons import Reason
from rota.scheduler.sequence import Phase, Refusal, Sequence


def refusal_of(books: Books, request_id: RequestId) -> Refusal | None:
    """Why a request waits, since when, and when to ask again; None if it does not wait."""
    sequence = books.sequences.get(request_id)
    return _refusal(books, sequence) if sequence and sequence.phase is Phase.WAITING else None


def explained(books: Books, request_id: RequestId, at: float) -> Explained:
    """Walks through the adapter's queue: meant for the one request that a client asks about, not for all."""
    sequence = books.sequences.get(request_id)
    if sequence is None:
        return Explained(request_id=request_id, at=at, state=Whereabouts.UNKNOWN)
    group = books.group_of(sequence)
    if sequence.phase is Phase.WAITING:
        refusal = _refusal(books, sequence)
        # Only its tenant's requests: how many others ask is their own affair.
        before = (one for one in group.queue if one.account is sequence.account)
        position = sum(one.arrival < sequence.arrival for one in before)
        return Explained(
            request_id=request_id,
            at=at,
            state=Whereabouts.WAITING,
            reason=refusal.reason,
            since=refusal.since,
            position=position,
        )
    if books.is_open(group):
        return Explained(request_id=request_id, at=at, state=Whereabouts.RUNNING)
    return Explained(
        request_id=request_id, at=at, state=Whereabouts.PARKED, reason=Reason.NOT_IN_SLOT.value, since=group.ran_at
    )


def inspected(books: Books, steps: int, at: float) -> Inspected:
    standings = tuple(_standing(books, group) for group in books.groups.values() if group.users or group is books.base)
    used = books.blocks.total - books.blocks.free
    return Inspected(
        at=at,
        steps=steps,
        rows=books.running_count,
        blocks=books.blocks.total,
        blocks_used=used,
        slots=books.slots.total,
        adapters=standings,
        engine_id=books.engine_id,
    )


def _standing(books: Books, group: Group) -> AdapterStanding:
    first = group.queue.first()
    is_open = books.is_open(group)
    return AdapterStanding(
        adapter_id=group.adapter_id,
        waiting=group.waiting,
        running=group.running if is_open else 0,
        parked=0 if is_open else group.running,
        oldest_at=first.request.arrived_at if first else None,
        reason=_refusal(books, first).reason if first else "",
    )


def _refusal(books: Books, sequence: Sequence) -> Refusal:
    if not books.is_open(books.group_of(sequence)):
        return Refusal(Reason.NOT_IN_SLOT.value, sequence.request.arrived_at)
    return sequence.refusal or Refusal("others of its adapter came first", sequence.request.arrived_at)
