"""Standings read from the books why a request waits and how every adapter stands, and change nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rota.core.events import AdapterStanding, Explained, Inspected, Whereabouts
from rota.core.ids import AdapterId, RequestId
from rota.policy.slot_policy import SlotPolicy
from rota.scheduler.books import Books
from rota.scheduler.counting import Summed, counted, summed
from rota.scheduler.group import Group
from rota.scheduler.queue import by_turn
from rota.scheduler.reasons import Reason
from rota.scheduler.sequence import Phase, Refusal, Sequence
from rota.scheduler.slot_candidates import SlotCandidates


def refusal_of(books: Books, request_id: RequestId) -> Refusal | None:
    """Why a request waits, since when, and when to ask again; None if it does not wait."""
    sequence = books.sequences.get(request_id)
    return _refusal(books, sequence) if sequence and sequence.phase is Phase.WAITING else None


class Standings:
    """Answers the queries of clients and operators."""

    def __init__(self, books: Books, candidates: SlotCandidates, policy: SlotPolicy) -> None:
        self._books = books
        self._candidates = candidates
        self._policy = policy

    def explained(self, request_id: RequestId, at: float) -> Explained:
        """Walks through the adapter's queue: meant for the one request that a client asks about, not for all."""
        books = self._books
        sequence = books.sequences.get(request_id)
        if sequence is None:
            return Explained(request_id=request_id, at=at, state=Whereabouts.UNKNOWN)
        group = books.group_of(sequence)
        # Between tenants, how many others wait is their own affair.
        outlook = self._outlook(group, is_counted=not books.accounts.are_shared)
        if sequence.phase is Phase.WAITING:
            refusal = _refusal(books, sequence)
            before = (one for one in group.queue if one.account is sequence.account)
            position = sum(by_turn(one) < by_turn(sequence) for one in before)
            return Explained(
                request_id=request_id,
                at=at,
                state=Whereabouts.WAITING,
                reason=refusal.reason,
                since=refusal.since,
                position=position,
                outlook=outlook,
            )
        if books.paused_at is not None:
            refusal = Refusal(Reason.PAUSED.value, books.paused_at)
        elif not books.is_open(group):
            refusal = Refusal(Reason.NOT_IN_SLOT.value, group.ran_at)
        elif sequence.row is None and sequence.refusal:
            refusal = sequence.refusal
        else:
            return Explained(request_id=request_id, at=at, state=Whereabouts.RUNNING)
        return Explained(
            request_id=request_id,
            at=at,
            state=Whereabouts.PARKED,
            reason=refusal.reason,
            since=refusal.since,
            outlook=outlook,
        )

    def inspected(self, steps: int, at: float, only: Collection[AdapterId] | None = None) -> Inspected:
        books = self._books
        used, pages = books.blocks.total - books.blocks.free, books.slots.pages
        told, others, absent = self._all() if only is None else summed(books, only)
        return Inspected(
            at=at,
            steps=steps,
            rows=books.rows.total - books.rows.free,
            blocks=books.blocks.total,
            blocks_used=used,
            slots=books.slots.total,
            adapters=told,
            engine_id=books.engine_id,
            pages=pages.total if pages else 0,
            pages_used=pages.used if pages else 0,
            slot_bytes=books.slot_bytes,
            others=others,
            absent=absent,
        )

    def _all(self) -> Summed:
        return tuple(map(self._standing, filter(self._is_in_use, self._books.groups.values()))), None, ()

    def _is_in_use(self, group: Group) -> bool:
        return bool(group.users) or group is self._books.base

    def _standing(self, group: Group) -> AdapterStanding:
        first = group.queue.first()
        reason = _refusal(self._books, first).reason if first else ""
        return replace(counted(self._books, group), reason=reason, outlook=self._outlook(group))

    def _outlook(self, group: Group, is_counted: bool = True) -> str:
        if group.adapter_id not in self._books.absent:
            return ""
        return self._policy.outlook(group, self._candidates).sentence(is_counted)


def _refusal(books: Books, sequence: Sequence) -> Refusal:
    if books.paused_at is not None:
        return Refusal(Reason.PAUSED.value, max(books.paused_at, sequence.request.arrived_at))
    if not books.is_open(books.group_of(sequence)):
        return Refusal(Reason.NOT_IN_SLOT.value, sequence.request.arrived_at)
    return sequence.refusal or Refusal("others of its adapter came first", sequence.request.arrived_at)
