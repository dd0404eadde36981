"""Replica books follow one replica by its events: which adapters it holds, and how much work is open there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    SlotState,
)
from rota.core.ids import AdapterId, RequestId, Slot
from rota.core.request import Request
from rota.policy.routing import ReplicaView

# What counts until something was measured.
FIRST_PACE_S = 100e-6
# After this many tokens a measurement counts half.
PACE_TOKENS = 10_000


@dataclass(slots=True)
class Booking:
    """An open request, in tokens that are still to come as far as anybody knows."""

    adapter_id: AdapterId
    prompt_tokens: int  # 0 once it was admitted
    answer_tokens: int


class Pace:
    """How long a token takes: the seconds of steps over their tokens, the latest counting most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def token_s(self) -> float:
        return self._seconds / self._tokens if self._tokens else FIRST_PACE_S

    def note(self, tokens: int, seconds: float) -> None:
        kept = PACE_TOKENS / (PACE_TOKENS + tokens)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds


class ReplicaBooks:
    """One replica's adapters and open requests; `view` is what a policy sees of them."""

    def __init__(self, number: int) -> None:
        self.view = ReplicaView(number=number)
        self.slots: set[AdapterId] = set()
        self.hosts: set[AdapterId] = set()
        self.pace = Pace()
        self._resident: dict[Slot, SlotChanged] = {}
        self._open: dict[RequestId, Booking] = {}
        self._expected = 0  # tokens of open requests that were booked: prompts not admitted, and answers
        self._produced = 0  # tokens of answers of open requests

    @property
    def queue_s(self) -> float:
        """How long the open work takes; no request is less than a token."""
        return max(len(self._open), self._expected - self._produced) * self.pace.token_s

    @property
    def open_requests(self) -> Iterable[RequestId]:
        return self._open.keys()

    def book(self, request: Request, answer_tokens: int) -> None:
        """A request goes to this replica; its answer will probably have so many tokens."""
        booking = Booking(request.adapter_id, len(request.prompt), answer_tokens)
        self._open[request.request_id] = booking
        self._expected += booking.prompt_tokens + booking.answer_tokens

    def observe(self, events: Iterable[Event]) -> Iterator[float]:
        """Take note of events; gives how long each copy took that has ended."""
        for event in events:
            match event:
                case Produced():
                    self._produced += len(event.tokens)
                    self.pace.note(len(event.tokens) + event.prompt_tokens, event.step_s)
                case Admitted():
                    self._admit(event.request_id)
                case Finished():
                    self._end(event)
                case SlotChanged():
                    yield from self._change(event)
                case HostChanged():
                    self._note_host(event)
                case EngineRestarted():
                    self.clear()

    def clear(self) -> None:
        """The engine is gone, and with it all that it held."""
        self.slots.clear()
        self.hosts.clear()
        self._resident.clear()
        self._open.clear()
        self._expected = self._produced = 0

    def _admit(self, request_id: RequestId) -> None:
        if booking := self._open.get(request_id):
            self._expected -= booking.prompt_tokens
            booking.prompt_tokens = 0

    def _end(self, event: Finished) -> None:
        if booking := self._open.pop(event.request_id, None):
            self._expected -= booking.prompt_tokens + booking.answer_tokens
            self._produced -= event.output_tokens

    def _note_host(self, event: HostChanged) -> None:
        if event.state is HostState.GONE:
            self.hosts.discard(event.adapter_id)
        else:
            self.hosts.add(event.adapter_id)  # a read that is under way need not be done again elsewhere

    def _change(self, event: SlotChanged) -> Iterator[float]:
        before = self._resident.pop(event.slot, None)
        if event.state is SlotState.EMPTY:
            self.slots.discard(event.adapter_id)
            return
        self._resident[event.slot] = event
        self.slots.add(event.adapter_id)
        if event.state is SlotState.READY and before and before.state is SlotState.LOADING:
            yield event.at - before.at
