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

    def __init__(self, books: Books, is_overlapped: bool, is_eager: bool) -> None:
        self._books = books
        self.is_overlapped = is_overlapped
        self.is_eager = is_eager

    def land(self, draft: Draft) -> None:
        """Adapters whose copies earlier plans ordered may be in this step: on the device the step waits for them.

        Copies are made one after the other beside the step before this one. A copy that is not complete when that step
        ends would make this whole step longer. So such an adapter, and those behind it, wait for the message.
        """
        books = self._books
        if not self.is_eager:
            return
        left_s = books.step_s
        for adapter_id in books.slots.on_their_way:
            copy_s = books.expected_copy_s(books.groups[adapter_id])
            left_s -= copy_s
            if not copy_s or left_s < 0:
                return
            arrive(books, adapter_id, draft.now)

    def move_in(self, draft: Draft, group: Group, reason: SlotReason) -> None:
        """Order an adapter's copy into an empty slot."""
        books = self._books
        place = books.slots.begin_load(group.adapter_id)
        books.hosts.use(group.adapter_id)
        books.note_users(group)
        load = Load(
            adapter_id=group.adapter_id,
            slot=place.slot,
            is_awaited=not self.is_overlapped,
            pages=place.pages,
            matrices=place.matrices,
        )
        draft.loads.append(load)
        _tell(books, place.slot, group.adapter_id, SlotState.LOADING, draft.now, reason)
        if not self.is_overlapped:
            arrive(books, group.adapter_id, draft.now)

    def replace(self, draft: Draft, leaver: Group, successor: Group) -> None:
        """A busy resident's slot goes to another adapter: the resident leaves, and its slot is loaded meanwhile.

        While there are more residents than open slots, the resident leaves and the other adapter waits on.
        """
        vacate(self._books, leaver, draft.now, SlotReason.TURN_OVER)
        if self._books.slots.empty:
            self.move_in(draft, successor, SlotReason.TURN_COME)


def arrive(books: Books, adapter_id: AdapterId, at: float) -> None:
    """An adapter's weights are in their slot, or will be before the next step reads them."""
    books.slots.finish_load(adapter_id)
    group = books.groups[adapter_id]
    group.slot_since, group.steps_before = at, group.steps
    _tell(books, books.slots.residencies[adapter_id].slot, adapter_id, SlotState.READY, at)
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
