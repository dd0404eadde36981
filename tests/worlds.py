"""Worlds for tests: virtual time around a device that computes."""

from __future__ import annotations

from collections.abc import Iterable

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, Finished, Produced
from rota.core.ids import BASE, AdapterId, RequestId, Row
from rota.core.messages import AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import ConstantCost, VirtualWorld
from rota.sim.world import Finish
from tests.fakes import FakeDevice, FakeTicket

STEP_S = 1.0


class DeviceWorld(VirtualWorld):
    """Virtual time, real plans: every step takes a second and is computed by a device."""

    def __init__(self, messages: Iterable[tuple[float, Message]], device: FakeDevice) -> None:
        super().__init__(messages, ConstantCost(STEP_S, load_s=0.6 * STEP_S, fetch_s=1.7 * STEP_S))
        self.device = device
        self._tickets: list[FakeTicket] = []
        self._arrived: dict[AdapterId, bool] = {BASE: True}
        self._adapter_of: dict[Row, AdapterId] = {}

    def receive(self, until: float) -> list[Message] | None:
        messages = super().receive(until)
        for message in messages or []:
            if isinstance(message, AdapterReady):
                self._arrived[message.adapter_id] = True
        return messages

    def submit(self, plan: StepPlan) -> Finish:
        for load in plan.loads:
            self._arrived[load.adapter_id] = load.is_awaited
        for seat in plan.seats:
            self._adapter_of[seat.row] = seat.adapter_id
        for row in (*plan.decodes, *(chunk.row for chunk in plan.chunks)):
            assert self._arrived[self._adapter_of[row]], "a step uses an adapter whose copy is not complete"
        self._tickets.append(self.device.submit(plan))
        return super().submit(plan)

    def collect(self, ticket: Finish) -> StepResult:
        result = self.device.collect(self._tickets.pop(0))
        return StepResult(
            at=super().collect(ticket).at, tokens=result.tokens, logprobs=result.logprobs, scores=result.scores
        )


def serve(
    messages: Iterable[tuple[float, Message]],
    device: FakeDevice,
    config: SchedulerConfig | None = None,
    depth: int = 1,
    policy: PolicyConfig | None = None,
    lora: LoraConfig | None = None,
) -> list[Event]:
    """Run messages to the end, checking the books after every batch of events."""
    scheduler = Scheduler(config or SchedulerConfig(), device.capacity, policy, lora)
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
