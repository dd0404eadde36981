"""A timed device notes what every step held and how long the device was at it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rota.core.capacity import Capacity
from rota.core.grammar import Grammar
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Device


@dataclass(frozen=True, slots=True)
class Step:
    """One step: [began_at, ended_at) is its own, less what it waited for the step before it."""

    decodes: int
    prompt_tokens: int
    context_tokens: int
    adapters: int
    began_at: float
    ended_at: float
    submit_s: float
    wait_s: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    @property
    def timing(self) -> dict[str, float]:
        """As `rota simulate --calibrate` reads it."""
        return {
            "decodes": self.decodes,
            "prompt_tokens": self.prompt_tokens,
            "context_tokens": self.context_tokens,
            "adapters": self.adapters,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Timed(Device[Any]):
    """A device beside its clock; `on_submit` is called before each step that computes."""

    device: Device[Any]
    steps: list[Step] = field(default_factory=list)
    on_submit: Callable[[StepPlan], None] | None = None
    _flying: deque[tuple[StepPlan, float, float]] = field(default_factory=deque)
    _ended_at: float = 0.0

    @property
    def capacity(self) -> Capacity:
        return self.device.capacity

    def listen(self, post: Callable[[Message], None]) -> None:
        self.device.listen(post)

    def work_while_idle(self) -> bool:
        return self.device.work_while_idle()

    def prepare(self, grammar: Grammar, then: Callable[[], None]) -> bool:
        return self.device.prepare(grammar, then)

    def clear(self) -> None:
        """Forget the steps so far."""
        self.steps.clear()

    def submit(self, plan: StepPlan) -> Any:
        if self.on_submit and (plan.decodes or plan.chunks):
            self.on_submit(plan)
        submitted_at = time.monotonic()
        ticket = self.device.submit(plan)
        self._flying.append((plan, submitted_at, time.monotonic() - submitted_at))
        return ticket

    def collect(self, ticket: Any) -> StepResult:
        asked_at = time.monotonic()
        result = self.device.collect(ticket)
        plan, submitted_at, submit_s = self._flying.popleft()
        if plan.decodes or plan.chunks:
            prompt_tokens = sum(chunk.length for chunk in plan.chunks)
            counts = (len(plan.decodes), prompt_tokens, plan.context_tokens, plan.adapters)
            began_at = max(submitted_at, self._ended_at)
            self.steps.append(Step(*counts, began_at, result.at, submit_s, result.at - asked_at))
        self._ended_at = result.at
        return result
