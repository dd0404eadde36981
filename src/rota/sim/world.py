"""The virtual world: a heap of messages to come, a clock that jumps, and a device that only takes time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult

StepCost = Callable[[StepPlan], float]
Finish = tuple[float, int]  # when a step is done, and how many tokens it gives


def constant_cost(seconds: float) -> StepCost:
    """Every step takes the same time."""
    return lambda plan: seconds


class VirtualWorld:
    """Same messages and cost, same run to the bit: ties keep the order in which messages were given."""

    def __init__(
        self, messages: Iterable[tuple[float, Message]], step_cost: StepCost, token: int = 0
    ) -> None:
        self._heap = [(at, order, message) for order, (at, message) in enumerate(messages)]
        heapq.heapify(self._heap)
        self._step_cost = step_cost
        self._token = token
        self._now = 0.0
        self._device_free_at = 0.0

    def now(self) -> float:
        return self._now

    def receive(self, until: float) -> list[Message] | None:
        """Jump to the next message or to `until`, whichever is first, and give all that are due."""
        next_at = self._heap[0][0] if self._heap else math.inf
        jump_to = min(next_at, until)
        if jump_to == math.inf:
            return None
        self._now = max(self._now, jump_to)
        due: list[Message] = []
        while self._heap and self._heap[0][0] <= self._now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def submit(self, plan: StepPlan) -> Finish:
        """The device works in order: a step begins when the one before it is done."""
        self._device_free_at = max(self._now, self._device_free_at) + self._step_cost(plan)
        return self._device_free_at, len(plan.sampled_rows)

    def collect(self, ticket: Finish) -> StepResult:
        done_at, tokens = ticket
        self._now = max(self._now, done_at)
        return StepResult(self._now, (self._token,) * tokens)
