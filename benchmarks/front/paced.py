"""A device that computes nothing: its steps end on the ticks of the machine's clock, with a token for every row."""

from __future__ import annotations

import time
from collections.abc import Callable

from front.ticks import CYCLE
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.messages import AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.world import Device

Due = tuple[int, int]  # a step's tick, and how many tokens it gives


def paced_device(step_s: float, tokens: tuple[int, ...], _: EngineConfig) -> PacedDevice:
    """What the engine process builds instead of an engine."""
    return PacedDevice(step_s, tokens)


class PacedDevice(Device[Due]):
    """A step a tick; with `step_s` 0 a step takes no time at all."""

    capacity = Capacity(blocks=8192, block_size=16, rows=256, max_sequence_tokens=8192, slots=8)
    token_s = 0.0  # it was not tried

    def __init__(self, step_s: float, tokens: tuple[int, ...]) -> None:
        self._step_s = step_s
        self._tokens = tokens
        self._tick = 0

    def listen(self, post: Callable[[Message], None]) -> None:
        self._post = post

    def submit(self, plan: StepPlan) -> Due:
        for adapter in plan.reads:
            self._post(AdapterFetched(adapter_id=adapter.adapter_id, at=time.monotonic()))
        for load in plan.loads:
            self._post(AdapterReady(load.adapter_id, time.monotonic()))
        if self._step_s and (plan.chunks or plan.decodes):
            self._tick = max(self._tick, int(time.monotonic() / self._step_s)) + 1
        return self._tick, len(plan.sampled_rows)

    def collect(self, ticket: Due) -> StepResult:
        tick, rows = ticket
        wait_s = tick * self._step_s - time.monotonic()
        if wait_s > 0.0:
            time.sleep(wait_s)
        return StepResult(at=time.monotonic(), tokens=(self._tokens[tick % CYCLE],) * rows)
