"""What a choice reads of replicas: adapters, open work and pace of each, followed by its events."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
from rota.policy.routing import TO_AND_FRO, Prices, RouteReason, RoutingChoice

# ── columns ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Columns hold what a choice reads of all replicas: an array for each thing, with a place for each replica.
#
# The rule is that of `policy/routing.py`. A test holds every choice against a plain loop over the replicas, to the bit
# (`tests/runtime/replicas/plain_rule.py`). That loop takes 2 µs for a replica, and a place in an array a few
# nanoseconds: a choice among 512 replicas costs little more than one among 16.

# How a replica holds an adapter: any of these together. One that is busy has requests for it.
IN_HOST, IN_SLOT, BUSY = 1, 2, 4
HAS_SLOT = IN_SLOT | BUSY  # with requests there the adapter has its turns
WAYS = 8

Seconds = NDArray[np.float64]
Ways = NDArray[np.uint8]


class Columns:
    """Bounded by what replicas hold: an adapter that no replica holds has no row."""

    def __init__(self, replicas: int) -> None:
        # Tokens, and not seconds: what a token costs is measured anew all the time, and is the same for all replicas.
        self.queue_tokens: NDArray[np.float64] = np.zeros(replicas)
        self.is_up: NDArray[np.bool_] = np.ones(replicas, np.bool_)
        self._up = replicas  # how many are
        self._away_s: Seconds = np.zeros(replicas)  # infinite while a replica is down
        # How long the line for a slot is, by the slots, for an adapter without requests there and for one with some.
        self._crowd: Seconds = np.zeros((2, replicas))
        self._held: dict[AdapterId, Ways] = {}

    def __len__(self) -> int:
        return len(self.queue_tokens)

    @property
    def rows(self) -> int:
        """Adapters that some replica holds."""
        return len(self._held)

    def add(self) -> None:
        """One more replica, which holds nothing and is not up yet."""
        self.queue_tokens, self._away_s = np.append(self.queue_tokens, 0.0), np.append(self._away_s, math.inf)
        self.is_up = np.append(self.is_up, False)
        self._crowd = np.pad(self._crowd, ((0, 0), (0, 1)))
        self._held = {adapter_id: np.append(row, np.uint8(0)) for adapter_id, row in self._held.items()}

    def set_up(self, replica: int, is_up: bool) -> None:
        self.is_up[replica] = is_up
        self._up = int(np.count_nonzero(self.is_up))
        self._away_s[replica] = 0.0 if is_up else math.inf

    def set_crowd(self, replica: int, newcomer: float, known: float) -> None:
        """The line for a slot, for an adapter without requests at the replica and for one with some."""
        self._crowd[0, replica], self._crowd[1, replica] = newcomer, known

    def hold(self, replica: int, adapter_id: AdapterId, way: int) -> None:
        row = self._held.get(adapter_id)
        if row is None:
            row = self._held[adapter_id] = np.zeros(len(self), np.uint8)
        row[replica] |= way

    def drop(self, replica: int, adapter_id: AdapterId, ways: int = WAYS - 1) -> None:
        row = self._held.get(adapter_id)
        if row is not None:
            row[replica] &= ~ways & WAYS - 1
            if not np.count_nonzero(row):
                del self._held[adapter_id]

    def forget(self, replica: int) -> None:
        """A replica holds nothing any more."""
        for adapter_id in list(self._held):
            self.drop(replica, adapter_id)

    def next_up(self, before: int) -> RoutingChoice | None:
        """The next replica that is up, behind the one that took the request before."""
        for step in range(1, len(self) + 1):
            number = (before + step) % len(self)
            if self.is_up[number]:
                return RoutingChoice(number, RouteReason.IN_TURN)
        return None

    def cheapest(
        self, adapter_id: AdapterId, prices: Prices, answer_s: float = 0.0, seen: Seconds | None = None
    ) -> RoutingChoice | None:
        """The replica with the lowest price for an answer that will take so long, of equal ones the lowest number.

        None if no replica is up. A request for the base model pays for no adapter, so its price is the queue.

        `seen` is how many tokens of the prompt each replica has computed before; None: none of them.
        """
        if not self._up:
            return None
        token_s = prices.token_s
        queue_s = self.queue_tokens * token_s
        price_s = queue_s + self._away_s if seen is None else queue_s - seen * token_s + self._away_s
        held = None
        if adapter_id != BASE:
            held = self._held.get(adapter_id)
            price_s += self._pauses(held, answer_s)
            price_s += _lack_s(held, prices)
        best = int(price_s.argmin())
        return RoutingChoice(best, self._reason(best, held, seen))

    def _pauses(self, held: Ways | None, answer_s: float) -> Seconds:
        newcomer, known = self._crowd[0], self._crowd[1]
        crowd: Seconds = newcomer if held is None else np.where(held >= BUSY, known, newcomer)
        return crowd * answer_s

    def _reason(self, best: int, held: Ways | None, seen: Seconds | None) -> RouteReason:
        if self._up == 1:
            return RouteReason.ONLY_ONE
        if held is not None and (reason := self._held_reason(int(held[best]), held)):
            return reason
        if seen is not None and seen[best]:
            return RouteReason.CACHED_PREFIX
        is_as_short = self.queue_tokens <= self.queue_tokens[best]
        is_shortest = np.count_nonzero(is_as_short & self.is_up) == 1
        return RouteReason.SHORTEST_QUEUE if is_shortest else RouteReason.LOWEST_NUMBER

    def _held_reason(self, own: int, held: Ways) -> RouteReason | None:
        if own & HAS_SLOT:
            return RouteReason.IN_SLOT
        ways = int(np.bitwise_or.reduce(held[self.is_up]))
        if ways & HAS_SLOT:
            return RouteReason.HOLDERS_BUSY
        if own:
            return RouteReason.IN_HOST_MEMORY
        return RouteReason.HOLDERS_BUSY if ways else None


def _lack_s(held: Ways | None, prices: Prices) -> Seconds | float:
    """What replicas pay for what they lack of an adapter."""
    load_s = TO_AND_FRO * prices.load_s
    absent_s = load_s + TO_AND_FRO * prices.fetch_s
    if held is None:
        return absent_s
    by_way = np.zeros(WAYS)
    by_way[0], by_way[IN_HOST] = absent_s, load_s
    return by_way.take(held)


# ── pace ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Pace is how long steps take, and how much longer for each token: measured, the latest counting most.

# What counts until something was measured.
FIRST_TOKEN_S, FIRST_STEP_S = 25e-6, 0.01
FEWEST_STEPS = 16
# A measurement counts half after about 350 steps, a second or more.
KEPT = 0.998
# A step always takes a while, however few tokens it has. Where the slope cannot be seen, because all steps are alike,
# it is taken to be this share of the mean.
LEAST_SHARE, UNSEEN_SHARE = 0.05, 0.25


class Pace:
    """A straight line through recent steps, tokens against seconds.

    What one more token adds is the line's slope. The mean would count the fixed part of a step as well, which a request
    that joins does not lengthen: most of a step, while few sequences run.
    """

    def __init__(self) -> None:
        self.token_s = FIRST_TOKEN_S
        self.step_s = FIRST_STEP_S
        self._steps = 0.0  # the sums below are of this many steps
        self._tokens = 0.0
        self._seconds = 0.0
        self._squares = 0.0
        self._products = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of this many tokens took so long."""
        self._steps = self._steps * KEPT + 1.0
        self._tokens = self._tokens * KEPT + tokens
        self._seconds = self._seconds * KEPT + seconds
        self._squares = self._squares * KEPT + tokens * tokens
        self._products = self._products * KEPT + tokens * seconds
        if self._steps >= FEWEST_STEPS:
            self.step_s = self._seconds / self._steps
            self.token_s = self._slope()

    def _slope(self) -> float:
        if not self._tokens:
            return FIRST_TOKEN_S
        mean_s = self._seconds / self._tokens
        spread = self._squares - self._tokens * self._tokens / self._steps
        if spread <= self._steps:  # less than a token in a step
            return mean_s * UNSEEN_SHARE
        slope = (self._products - self._tokens * self._seconds / self._steps) / spread
        return min(mean_s, max(mean_s * LEAST_SHARE, slope))


# ── books ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Replica books follow one replica by its events: which adapters it holds, and how much work is open there.

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
        self.pace = pace
        self.busy: dict[AdapterId, int] = {}  # open requests by adapter; the base model needs no slot
        self.slot_count = 0  # 0 until all slots were seen taken
        self._number, self._columns = number, columns
        self._load, self._fetch = load, fetch
        self._resident: dict[Slot, SlotChanged] = {}
        self._reading: dict[AdapterId, float] = {}  # since when
        self._open: dict[RequestId, Booking] = {}
        self.open_tokens = 0  # of all bookings

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
        self._columns.forget(self._number)
        for held in (self.busy, self._resident, self._reading, self._open):
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
            self._columns.drop(self._number, event.adapter_id, IN_SLOT)
            if event.reason in MADE_ROOM:
                self.slot_count = len(self._resident) + 1
                self._line_up()
            return
        self._resident[event.slot] = event
        self._columns.hold(self._number, event.adapter_id, IN_SLOT)
        if event.state is SlotState.READY and before and before.state is SlotState.LOADING:
            self._load.note(event.at - before.at)

    def _note_host(self, event: HostChanged) -> None:
        began_at = self._reading.pop(event.adapter_id, None)
        if event.state is HostState.GONE:
            self._columns.drop(self._number, event.adapter_id, IN_HOST)
            return
        # A read that is under way need not be done elsewhere.
        self._columns.hold(self._number, event.adapter_id, IN_HOST)
        if event.state is HostState.READING:
            self._reading[event.adapter_id] = event.at
        elif began_at is not None:
            self._fetch.note(event.at - began_at)
