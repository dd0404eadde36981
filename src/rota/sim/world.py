"""The virtual world is a heap of future messages, a clock that jumps, and a device that only takes time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import count

from rota.core.messages import AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.sim.cost import CostModel

Finish = tuple[float, int]  # when a step is done, and how many tokens it gives


class VirtualWorld:
    """The same messages and costs give the same run to the bit: messages of the same time keep their order."""

    def __init__(self, messages: Iterable[tuple[float, Message]], costs: CostModel, token: int = 0) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, Message, Iterator[tuple[float, Message]] | None]] = []
        for at, message in messages:
            self.post(at, message)
        self._costs = costs
        self._token = token
        self._now = 0.0
        self._device_free_at = 0.0
        self._copies_free_at = 0.0

    def now(self) -> float:
        return self._now

    def receive(self, until: float) -> list[Message] | None:
        """Jump to the next message or to `until`, whichever is first, and give all messages that are due."""
        next_at = self._heap[0][0] if self._heap else math.inf
        jump_to = min(next_at, until)
        if jump_to == math.inf:
            return None
        self._now = max(self._now, jump_to)
        due: list[Message] = []
        while self._heap and self._heap[0][0] <= self._now:
            _, _, message, stream = heapq.heappop(self._heap)
            due.append(message)
            if stream:
                self.follow(stream)
        return due

    def submit(self, plan: StepPlan) -> Finish:
        """The device works in order: a step begins when the step before it is done. Copies run beside the steps."""
        self._order_adapters(plan)
        if plan.chunks or plan.decodes:
            awaited_s = self._costs.load_s * sum(load.is_awaited for load in plan.loads)
            self._device_free_at = max(self._now, self._device_free_at) + self._costs.step_s(plan) + awaited_s
        return max(self._now, self._device_free_at), len(plan.sampled_rows)

    def collect(self, ticket: Finish) -> StepResult:
        done_at, tokens = ticket
        self._now = max(self._now, done_at)
        return StepResult(at=self._now, tokens=(self._token,) * tokens)

    def _order_adapters(self, plan: StepPlan) -> None:
        for adapter in plan.fetches:
            at = self._now + self._costs.fetch_s
            self.post(at, AdapterFetched(adapter.adapter_id, at))
        for load in plan.loads:
            if load.is_awaited:
                continue
            # The former resident of the slot may still be in the step that runs now.
            at = max(self._now, self._device_free_at, self._copies_free_at) + self._costs.load_s
            self._copies_free_at = at
            self.post(at, AdapterReady(load.adapter_id, at))

    def post(self, at: float, message: Message) -> None:
        """A message will come at `at`."""
        heapq.heappush(self._heap, (at, next(self._order), message, None))

    def follow(self, stream: Iterator[tuple[float, Message]]) -> None:
        """Messages will come from a stream; the next one is taken when the one before it has come."""
        for at, message in stream:
            heapq.heappush(self._heap, (at, next(self._order), message, stream))
            return
