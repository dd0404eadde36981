"""The virtual world is a heap of future messages, a clock that jumps, and a device that only takes time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from rota.core.ids import AdapterId, Row
from rota.core.messages import AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.sim.cost import LinearCost

# ── mail ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Mail is a heap of messages that will come; messages of the same time keep their order.

Stream = Iterator[tuple[float, Message]]


class Mail:
    """Messages, each with the moment at which it comes."""

    def __init__(self, messages: Iterable[tuple[float, Message]] = ()) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, Message, Stream | None]] = []
        for at, message in messages:
            self.post(at, message)

    @property
    def next_at(self) -> float:
        """When the next message comes."""
        return self._heap[0][0] if self._heap else math.inf

    def post(self, at: float, message: Message) -> None:
        """A message will come at `at`."""
        heapq.heappush(self._heap, (at, next(self._order), message, None))

    def follow(self, stream: Stream) -> None:
        """Messages will come from a stream; the next one is taken when the one before it has come."""
        for at, message in stream:
            heapq.heappush(self._heap, (at, next(self._order), message, stream))
            return

    def take(self, until: float) -> list[Message]:
        """All messages that have come by then."""
        due: list[Message] = []
        while self._heap and self._heap[0][0] <= until:
            _, _, message, stream = heapq.heappop(self._heap)
            due.append(message)
            if stream:
                self.follow(stream)
        return due


PagesOf = Callable[[AdapterId], int]
Finish = tuple[float, tuple[int, ...], int]  # when a step is done, its tokens, and how many vectors it gives


class VirtualWorld(Mail):
    """The same messages and costs give the same run to the bit: messages of the same time keep their order.

    The n-th token of an answer that may end by a stop token is n, so a request's stop token says how long its answer
    is. All other tokens are `token`.
    """

    def __init__(
        self,
        messages: Iterable[tuple[float, Message]],
        costs: LinearCost,
        token: int = 0,
        fetch_s: float | None = None,
        pages_of: PagesOf | None = None,
    ) -> None:
        """`fetch_s` goes before what the cost model says about the disk; `pages_of` says how large adapters are."""
        super().__init__(messages)
        self._costs = costs
        self._fetch_s = costs.fetch_s if fetch_s is None else fetch_s
        self._pages_of = pages_of
        self._token = token
        self._counts: dict[Row, int] = {}  # tokens of answers so far, of rows whose requests have a stop token
        self._now = 0.0
        self._device_free_at = 0.0
        self._copies_free_at = 0.0
        self._copied_at: dict[AdapterId, float] = {}  # of copies that may be under way
        self._adapter_of: dict[Row, AdapterId] = {}
        self._guided: set[Row] = set()  # rows whose answers follow a grammar

    def now(self) -> float:
        return self._now

    def receive(self, until: float) -> list[Message] | None:
        """Jump to the next message or to `until`, whichever is first, and give all messages that are due."""
        jump_to = min(self.next_at, until)
        if jump_to == math.inf:
            return None
        self._now = max(self._now, jump_to)
        return self.take(self._now)

    def submit(self, plan: StepPlan) -> Finish:
        """The device works in order: a step begins when the step before it is done. Copies run beside the steps.

        A step waits for the copies of its own adapters, and for no others.
        """
        for seat in plan.seats:
            self._adapter_of[seat.row] = seat.adapter_id
        copied_at = self._copied_for(plan)
        self._order_adapters(plan)
        if plan.chunks or plan.decodes:
            awaited_s = self._costs.load_s * sum(load.is_awaited for load in plan.loads)
            begins_at = max(self._now, self._device_free_at, copied_at)
            masks_s = self._costs.masks_s(self._guided_rows(plan))
            self._device_free_at = begins_at + self._costs.step_s(plan) + awaited_s + masks_s
        return max(self._now, self._device_free_at), self._tokens(plan), len(plan.pools)

    def collect(self, ticket: Finish) -> StepResult:
        done_at, tokens, pools = ticket
        self._now = max(self._now, done_at)
        return StepResult(at=self._now, tokens=tokens, pooled=((0.0,),) * pools)

    def _tokens(self, plan: StepPlan) -> tuple[int, ...]:
        counts = self._counts
        for seat in plan.seats:
            if seat.sampling.stop_token_ids:
                counts[seat.row] = len(seat.tokens) - seat.prompt_length
            else:
                counts.pop(seat.row, None)
        if not counts:
            return (self._token,) * len(plan.sampled_rows)
        return tuple([self._next_token(row) for row in plan.sampled_rows])

    def _next_token(self, row: Row) -> int:
        if row not in self._counts:
            return self._token
        self._counts[row] += 1
        return self._counts[row]

    def _guided_rows(self, plan: StepPlan) -> int:
        """How many rows of a step get a token by a grammar."""
        for seat in plan.seats:
            if seat.sampling.grammar is not None:
                self._guided.add(seat.row)
            elif self._guided:
                self._guided.discard(seat.row)
        return sum(row in self._guided for row in plan.sampled_rows) if self._guided else 0

    def _copied_for(self, plan: StepPlan) -> float:
        """When the copies of the adapters in a step are complete."""
        if not self._copied_at:
            return 0.0
        self._copied_at = {one: at for one, at in self._copied_at.items() if at > self._now}
        rows = (*plan.decodes, *(chunk.row for chunk in plan.chunks)) if self._copied_at else ()
        used = {self._adapter_of[row] for row in rows}
        return max((at for one, at in self._copied_at.items() if one in used), default=0.0)

    def _order_adapters(self, plan: StepPlan) -> None:
        for adapter in plan.reads:
            at = self._now + self._fetch_s
            pages = self._pages_of(adapter.adapter_id) if self._pages_of else 0
            self.post(at, AdapterFetched(adapter_id=adapter.adapter_id, at=at, pages=pages))
        for load in plan.loads:
            if load.is_awaited:
                continue
            # The former resident of the slot may still be in the step that runs now.
            at = max(self._now, self._device_free_at, self._copies_free_at) + self._costs.load_s
            self._copies_free_at = self._copied_at[load.adapter_id] = at
            self.post(at, AdapterReady(load.adapter_id, at, self._costs.load_s))
