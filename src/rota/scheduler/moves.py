"""Moves take adapters into slots and out of slots, and tell observers about it."""

from __future__ import annotations

from rota.core.events import SlotChanged, SlotReason, SlotState
from rota.core.ids import AdapterId, Slot
from rota.core.plan import Load
from rota.scheduler.books import Books
from rota.scheduler.draft import Draft
from rota.scheduler.group import Group


class Moves:
    """With overlap a copy runs beside the steps; without it the step itself waits for the copy."""

    def __init__(self, books: Books, is_overlapped: bool) -> None:
        self._books = books
        self.is_overlapped = is_overlapped

    def move_in(self, draft: Draft, group: Group, reason: SlotReason, replaces: AdapterId | None = None) -> None:
        """Order an adapter's copy into a slot; the resident it replaces runs until the copy is complete."""
        books = self._books
        slot = books.slots.begin_load(group.adapter_id, replaces)
        books.hosts.use(group.adapter_id)
        books.note_users(group)
        draft.loads.append(Load(group.adapter_id, slot, is_awaited=not self.is_overlapped))
        _tell(books, slot, group.adapter_id, SlotState.LOADING, draft.now, reason)
        if not self.is_overlapped:
            arrive(books, group.adapter_id, draft.now)

    def replace(self, draft: Draft, leaver: Group, successor: Group) -> None:
        """A busy resident's slot goes to another adapter."""
        if self.is_overlapped:
            self.move_in(draft, successor, SlotReason.TURN_COME, replaces=leaver.adapter_id)
        else:
            vacate(self._books, leaver, draft.now, SlotReason.TURN_OVER)
            self.move_in(draft, successor, SlotReason.TURN_COME)


def arrive(books: Books, adapter_id: AdapterId, at: float) -> None:
    """An adapter's weights are in their slot; the resident it replaces leaves."""
    group = books.groups[adapter_id]
    leaver = books.slots.finish_load(adapter_id)
    group.slot_since = at
    slot = books.slots.residencies[adapter_id].slot
    _tell(books, slot, adapter_id, SlotState.READY, at)
    if leaver is not None and not group.users:
        # The requests of the new adapter have ended: a resident with work does not leave for an adapter without work.
        vacate(books, group, at, SlotReason.CALLED_OFF)
    elif leaver is not None:
        vacate(books, books.groups[leaver], at, SlotReason.TURN_OVER)
    else:
        books.note_slots()


def vacate(books: Books, group: Group, at: float, reason: SlotReason, detail: str = "") -> None:
    """A slot is free from now on; its former resident's sequences are parked."""
    slot = books.slots.vacate(group.adapter_id)
    books.note_users(group)
    books.note_slots()
    _tell(books, slot, group.adapter_id, SlotState.EMPTY, at, reason, detail)


def _tell(
    books: Books,
    slot: Slot,
    adapter_id: AdapterId,
    state: SlotState,
    at: float,
    reason: SlotReason | None = None,
    detail: str = "",
) -> None:
    books.outbox.append(
        SlotChanged(
            at=at,
            slot=slot,
            adapter_id=adapter_id,
            state=state,
            reason=reason,
            detail=detail,
            engine_id=books.engine_id,
        )
    )
