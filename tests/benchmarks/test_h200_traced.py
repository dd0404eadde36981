"""The traced device: which steps may have waited for an adapter's copy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.h200.traced import Clock, Traced
from rota.core.ids import AdapterId, Row, Slot
from rota.core.messages import AdapterReady, Message
from rota.core.plan import Load, StepPlan, StepResult


class SlowCopies:
    """A device whose copies end when the test says so."""

    def __init__(self) -> None:
        self.post: Callable[[Message], None] = lambda _: None

    def listen(self, post: Callable[[Message], None]) -> None:
        self.post = post

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        return StepResult(at=0.0)


def test_a_step_counts_copies_of_its_own_adapters_and_of_others():
    device: Any = SlowCopies()
    traced = Traced(device, _clock=Clock(has_gpu=False))
    traced.listen(lambda _: None)
    seats: Any = tuple(SimpleNamespace(row=Row(number), adapter_id=AdapterId(number)) for number in (1, 2))

    def step(number: int, **parts: Any) -> None:
        traced.collect(traced.submit(StepPlan(step_id=number, decodes=(Row(1),), **parts)))

    step(
        1, seats=seats, loads=(Load(adapter_id=AdapterId(1), slot=Slot(0)), Load(adapter_id=AdapterId(2), slot=Slot(1)))
    )
    device.post(AdapterReady(AdapterId(1), at=0.0, copy_s=0.5))
    step(2)
    device.post(AdapterReady(AdapterId(2), at=0.0, copy_s=0.25))
    step(3)
    assert [(step.copies, step.others) for step in traced.trace()] == [(1, 1), (0, 1), (0, 0)]
    assert traced.copy_s == [0.5, 0.25]
