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
    """One replica's adapters and open requests; `view` is what a policy sees of them.

    All that is kept here is bounded by what is open or held on the replica.
    """

    def __init__(self, number: int, pace: Pace, load: Mean, fetch: Mean) -> None:
        """Replicas are alike, so they share what was measured. A slow one has a longer queue, in tokens too."""
        self.view = ReplicaView(number=number)
        self.pace = pace
        self.slots: set[AdapterId] = set()
        self.hosts: set[AdapterId] = set()
        self.busy: dict[AdapterId, int] = {}  # open requests by adapter; the base model needs no slot
        self._load, self._fetch = load, fetch
        self._slot_count = 0  # 0 until all slots were seen taken
        self._resident: dict[Slot, SlotChanged] = {}
        self._reading: dict[AdapterId, float] = {}  # since when
        self._open: dict[RequestId, Booking] = {}
        self.open_tokens = 0  # of all bookings

    @property
    def open_requests(self) -> Iterable[RequestId]:
        return self._open.keys()

    def book(self, request: Request, answer_tokens: int) -> None:
        """The request that the view was filled in for goes here; its answer will probably have so many tokens."""
        prompt_tokens = len(request.prompt) - self.view.prefix_tokens
        booking = Booking(
            adapter_id=request.adapter_id,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            least=answer_tokens // 4,
        )
        self._open[request.request_id] = booking
        self.open_tokens += booking.prompt_tokens + booking.answer_tokens
        if request.adapter_id != BASE:
            self.busy[request.adapter_id] = self.busy.get(request.adapter_id, 0) + 1
        self._measure()

    def end(self, request_id: RequestId) -> None:
        """A request has ended, or goes elsewhere."""
        booking = self._open.pop(request_id, None)
        if booking is None:
            return
        self.open_tokens -= booking.prompt_tokens + booking.answer_tokens
        if booking.adapter_id != BASE:
            self._free(booking.adapter_id)

    def look(self, adapter_id: AdapterId, answer_tokens: int) -> None:
        """Fill the view in for a request of this adapter."""
        view, busy = self.view, self.busy
        is_busy = adapter_id in busy
        view.has_slot = is_busy or adapter_id in self.slots
        view.has_host_copy = adapter_id in self.hosts
        # A slot is free about once in an answer's time. Of the adapters in line for one, half stand before this one.
        in_line = len(busy) + (not is_busy) - self._slot_count if self._slot_count else 0
        view.pause_s = 0.5 * in_line / self._slot_count * answer_tokens * self.pace.step_s if in_line > 0 else 0.0

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
        for held in (self.slots, self.hosts, self.busy, self._resident, self._reading, self._open):
            held.clear()
        self.open_tokens = 0
        self._measure()

    def _measure(self) -> None:
        self.view.queue_s = self.open_tokens * self.pace.token_s

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

    def _free(self, adapter_id: AdapterId) -> None:
        self.busy[adapter_id] -= 1
        if not self.busy[adapter_id]:
            del self.busy[adapter_id]

    def _note_slot(self, event: SlotChanged) -> None:
        before = self._resident.pop(event.slot, None)
        if event.state is SlotState.EMPTY:
            self.slots.discard(event.adapter_id)
            if event.reason in MADE_ROOM:
                self._slot_count = len(self._resident) + 1
            return
        self._resident[event.slot] = event
        self.slots.add(event.adapter_id)
        if event.state is SlotState.READY and before and before.state is SlotState.LOADING:
            self._load.note(event.at - before.at)

    def _note_host(self, event: HostChanged) -> None:
        began_at = self._reading.pop(event.adapter_id, None)
        if event.state is HostState.GONE:
            self.hosts.discard(event.adapter_id)
            return
        self.hosts.add(event.adapter_id)  # a read that is under way need not be done elsewhere
        if event.state is HostState.READING:
            self._reading[event.adapter_id] = event.at
        elif began_at is not None:
            self._fetch.note(event.at - began_at)
