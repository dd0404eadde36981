"""Worlds for tests: virtual time around a device that computes."""

from __future__ import annotations

from collections.abc import Iterable

from rota.core.config import SchedulerConfig
from rota.core.events import Event, Finished, Produced
from rota.core.ids import RequestId
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim.world import VirtualWorld, constant_cost
from tests.fakes import FakeDevice, FakeTicket

STEP_S = 1.0


class DeviceWorld(VirtualWorld):
    """Virtual time, real plans: every step takes a second and is computed by a device."""

    def __init__(self, messages: Iterable[tuple[float, Message]], device: FakeDevice) -> None:
        super().__init__(messages, constant_cost(STEP_S))
        self.device = device
        self._tickets: list[FakeTicket] = []

    def submit(self, plan: StepPlan) -> tuple[float, int]:
        self._tickets.append(self.device.submit(plan))
        return super().submit(plan)

    def collect(self, ticket: tuple[float, int]) -> StepResult:
        result = self.device.collect(self._tickets.pop(0))
        return StepResult(super().collect(ticket).at, result.tokens, result.logprobs)


def serve(
    messages: Iterable[tuple[float, Message]],
    device: FakeDevice,
    config: SchedulerConfig | None = None,
    depth: int = 1,
) -> list[Event]:
    """Run messages to the end, checking the books after every batch of events."""
    scheduler = Scheduler(config or SchedulerConfig(), device.capacity)
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        scheduler.check()
        events.extend(batch)

    run(scheduler, DeviceWorld(messages, device), emit, depth)
    scheduler.check()
    assert scheduler.is_idle
    return events


def outputs(events: Iterable[Event]) -> dict[RequestId, list[int]]:
    """The tokens each request was given."""
    given: dict[RequestId, list[int]] = {}
    for event in events:
        if isinstance(event, Produced):
            for request_id, token in zip(event.request_ids, event.tokens, strict=True):
                given.setdefault(request_id, []).append(token)
    return given


def endings(events: Iterable[Event]) -> dict[RequestId, Finished]:
    """The last event of each request; fails if one ended twice."""
    ended: dict[RequestId, Finished] = {}
    for event in events:
        if isinstance(event, Finished):
            assert event.request_id not in ended, f"{event.request_id} ended twice"
            ended[event.request_id] = event
    return ended
