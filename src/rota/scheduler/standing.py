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
    if not books.is_open(group):
        refusal = Refusal(Reason.NOT_IN_SLOT.value, group.ran_at)
    elif sequence.row is None and sequence.refusal:
        refusal = sequence.refusal
    else:
        return Explained(request_id=request_id, at=at, state=Whereabouts.RUNNING)
    return Explained(request_id=request_id, at=at, state=Whereabouts.PARKED, reason=refusal.reason, since=refusal.since)


def inspected(books: Books, steps: int, at: float) -> Inspected:
    standings = tuple(_standing(books, group) for group in books.groups.values() if group.users or group is books.base)
    used = books.blocks.total - books.blocks.free
    return Inspected(
        at=at,
        steps=steps,
        rows=books.rows.total - books.rows.free,
        blocks=books.blocks.total,
        blocks_used=used,
        slots=books.slots.total,
        adapters=standings,
        engine_id=books.engine_id,
    )


def _standing(books: Books, group: Group) -> AdapterStanding:
    first = group.queue.first()
    running = group.rows if books.is_open(group) else 0
    return AdapterStanding(
        adapter_id=group.adapter_id,
        waiting=group.waiting,
        running=running,
        parked=group.running - running,
        oldest_at=first.request.arrived_at if first else None,
        reason=_refusal(books, first).reason if first else "",
    )


def _refusal(books: Books, sequence: Sequence) -> Refusal:
    if not books.is_open(books.group_of(sequence)):
        return Refusal(Reason.NOT_IN_SLOT.value, sequence.request.arrived_at)
    return sequence.refusal or Refusal("others of its adapter came first", sequence.request.arrived_at)
