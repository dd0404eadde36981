"""Replica books follow one replica by its events: which adapters it holds, and how much work is open there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rota.core.events import (
    Admitted,
    EngineRestarted,
    Event,
    Finished,
    HostChanged,
    HostState,
    Produced,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import BASE, AdapterId, RequestId, Slot
from rota.core.request import Request
from rota.policy.routing import ReplicaView
from rota.runtime.routing.columns import BUSY, IN_HOST, IN_SLOT, Columns
from rota.runtime.routing.pace import Pace

# What counts until something was measured, and the share of a new measurement in the mean.
FIRST_LOAD_S, FIRST_FETCH_S = 0.002, 0.05
SHARE = 0.05
# An adapter that leaves for one of these reasons leaves because all slots were taken.
MADE_ROOM = (SlotReason.TURN_OVER, SlotReason.IDLE)


@dataclass(slots=True)
class Mean:
    """A mean of seconds, the latest counting most."""

    seconds: float

    def note(self, seconds: float) -> None:
        self.seconds += SHARE * (seconds - self.seconds)


@dataclass(slots=True, kw_only=True)
class Booking:
    """An open request, and how many tokens are expected of it still."""

    adapter_id: AdapterId
    prompt_tokens: int  # 0 once it was admitted
    answer_tokens: int
    least: int  # an answer that is longer than expected still counts as this many


class ReplicaBooks:
    """One replica's adapters and open requests; the replica's place in the columns is kept up to date.

    All that is kept here is bounded by what is open or held on the replica.
    """

    def __init__(self, number: int, pace: Pace, load: Mean, fetch: Mean, columns: Columns) -> None:
        """Replicas are alike, so they share what was measured. A slow one has a longer queue, in tokens too."""
        self.view = ReplicaView(number=number)  # without what a request adds
        self.pace = pace
        self.slots: set[AdapterId] = set()
        self.hosts: set[AdapterId] = set()
        self.busy: dict[AdapterId, int] = {}  # open requests by adapter; the base model needs no slot
        self.slot_count = 0  # 0 until all slots were seen taken
        self._number, self._columns = number, columns
        self._load, self._fetch = load, fetch
        self._resident: dict[Slot, SlotChanged] = {}
        self._reading: dict[AdapterId, float] = {}  # since when
        self._open: dict[RequestId, Booking] = {}
        self.open_tokens = 0  # of all bookings

    @property
    def queue_s(self) -> float:
        """What the open work adds to a request, by what a token costs now."""
        return self.open_tokens * self.pace.token_s

    @property
    def open_requests(self) -> Iterable[RequestId]:
        return self._open.keys()

    def book(self, request: Request, answer_tokens: int, prefix_tokens: int = 0) -> None:
        """A request goes here; its answer will probably have so many tokens, and so many of its prompt are cached."""
        booking = Booking(
            adapter_id=request.adapter_id,
            prompt_tokens=len(request.prompt) - prefix_tokens,
            answer_tokens=answer_tokens,
            least=answer_tokens // 4,
        )
        self._open[request.request_id] = booking
        self.open_tokens += booking.prompt_tokens + booking.answer_tokens
        if request.adapter_id != BASE:
            self._occupy(request.adapter_id)
        self._measure()

    def end(self, request_id: RequestId) -> None:
        """A request has ended, or goes elsewhere."""
        booking = self._open.pop(request_id, None)
        if booking is None:
            return
        self.open_tokens -= booking.prompt_tokens + booking.answer_tokens
        if booking.adapter_id != BASE:
            self._free(booking.adapter_id)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Produced():
                    self._note_tokens(event.request_ids)
                    self.pace.note(len(event.tokens) + event.prompt_tokens, event.step_s)
                case Admitted():
                    self._admit(event.request_id)
                case Finished():
                    self.end(event.request_id)
                case SlotChanged():
                    self._note_slot(event)
                case HostChanged():
                    self._note_host(event)
                case EngineRestarted():
                    self.clear()
        self._measure()

    def clear(self) -> None:
        """The engine is gone, and with it all that it held."""
        for adapter_id in {*self.slots, *self.hosts, *self.busy}:
            self._columns.drop(self._number, adapter_id)
        for held in (self.slots, self.hosts, self.busy, self._resident, self._reading, self._open):
            held.clear()
        self.open_tokens = 0
        self._measure()
        self._line_up()

    def _measure(self) -> None:
        self._columns.queue_tokens[self._number] = self.open_tokens

    def _line_up(self) -> None:
        """Adapters have come or gone that have requests here, or another number of slots was seen.

        A slot is free about once in an answer's time. Of the adapters in line for one, half stand before a request's.
        """
        if slots := self.slot_count:
            in_line = len(self.busy) - slots
            self._columns.set_crowd(self._number, 0.5 * max(0, in_line + 1) / slots, 0.5 * max(0, in_line) / slots)

    def _note_tokens(self, request_ids: Iterable[RequestId]) -> None:
        bookings = self._open
        for request_id in request_ids:
            booking = bookings.get(request_id)
            if booking and booking.answer_tokens > booking.least:
                booking.answer_tokens -= 1
                self.open_tokens -= 1

    def _admit(self, request_id: RequestId) -> None:
        if booking := self._open.get(request_id):
            self.open_tokens -= booking.prompt_tokens
            booking.prompt_tokens = 0

    def _occupy(self, adapter_id: AdapterId) -> None:
        before = self.busy.get(adapter_id, 0)
        self.busy[adapter_id] = before + 1
        if not before:
            self._columns.hold(self._number, adapter_id, BUSY)
            self._line_up()

    def _free(self, adapter_id: AdapterId) -> None:
        self.busy[adapter_id] -= 1
        if not self.busy[adapter_id]:
            del self.busy[adapter_id]
            self._columns.drop(self._number, adapter_id, BUSY)
            self._line_up()

    def _note_slot(self, event: SlotChanged) -> None:
        before = self._resident.pop(event.slot, None)
        if event.state is SlotState.EMPTY:
            self.slots.discard(event.adapter_id)
            self._columns.drop(self._number, event.adapter_id, IN_SLOT)
            if event.reason in MADE_ROOM:
                self.slot_count = len(self._resident) + 1
                self._line_up()
            return
        self._resident[event.slot] = event
        self.slots.add(event.adapter_id)
        self._columns.hold(self._number, event.adapter_id, IN_SLOT)
        if event.state is SlotState.READY and before and before.state is SlotState.LOADING:
            self._load.note(event.at - before.at)

    def _note_host(self, event: HostChanged) -> None:
        began_at = self._reading.pop(event.adapter_id, None)
        if event.state is HostState.GONE:
            self.hosts.discard(event.adapter_id)
            self._columns.drop(self._number, event.adapter_id, IN_HOST)
            return
        self.hosts.add(event.adapter_id)  # a read that is under way need not be done elsewhere
        self._columns.hold(self._number, event.adapter_id, IN_HOST)
        if event.state is HostState.READING:
            self._reading[event.adapter_id] = event.at
        elif began_at is not None:
            self._fetch.note(event.at - began_at)
