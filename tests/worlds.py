"""Worlds for tests: virtual time around a device that computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, Finished, Produced
from rota.core.ids import BASE, AdapterId, RequestId, Row
from rota.core.messages import AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import ConstantCost, VirtualWorld
from rota.sim.world import Finish, PagesOf
from tests.fakes import FakeDevice, FakeTicket

STEP_S = 1.0
# No traffic of the tests needs so many steps: requests that take turns for ever are as bad as a loop that waits.
MOST_STEPS = 5000
LOAD_S = 0.6 * STEP_S


class DeviceWorld(VirtualWorld):
    """Virtual time, real plans: every step takes a second and is computed by a device.

    At depth 2 a step may use an adapter whose copy an earlier plan has ordered, if copies are shorter than steps.
    """

    def __init__(
        self,
        messages: Iterable[tuple[float, Message]],
        device: FakeDevice,
        depth: int = 1,
        load_s: float = LOAD_S,
        fetch_s: float = 1.7 * STEP_S,
        pages_of: PagesOf | None = None,
    ) -> None:
        super().__init__(messages, ConstantCost(seconds=STEP_S, load_s=load_s, fetch_s=fetch_s), pages_of=pages_of)
        self.device = device
        self._is_eager = depth > 1 and load_s <= STEP_S
        self._tickets: list[FakeTicket] = []
        self._arrived: dict[AdapterId, bool] = {BASE: True}
        self._adapter_of: dict[Row, AdapterId] = {}
        self._steps = 0

    def receive(self, until: float) -> list[Message] | None:
        messages = super().receive(until)
        for message in messages or []:
            if isinstance(message, AdapterReady):
                self._arrived[message.adapter_id] = True
        return messages

    def submit(self, plan: StepPlan) -> Finish:
        self._steps += 1
        assert self._steps < MOST_STEPS, "steps without end"
        if self._is_eager:
            self._arrived = dict.fromkeys(self._arrived, True)
        for load in plan.loads:
            self._arrived[load.adapter_id] = load.is_awaited
        for adapter_id in self.used(plan):
            assert self._arrived[adapter_id], "a step uses an adapter whose copy is not complete"
        self._tickets.append(self.device.submit(plan))
        return super().submit(plan)

    def used(self, plan: StepPlan) -> set[AdapterId]:
        """The adapters in a step that is about to be submitted."""
        self._adapter_of.update((seat.row, seat.adapter_id) for seat in plan.seats)
        return {self._adapter_of[row] for row in (*plan.decodes, *(chunk.row for chunk in plan.chunks))}

    def collect(self, ticket: Finish) -> StepResult:
        result = self.device.collect(self._tickets.pop(0))
        return replace(result, at=super().collect(ticket).at)


def serve(
    messages: Iterable[tuple[float, Message]],
    device: FakeDevice,
    config: SchedulerConfig | None = None,
    depth: Literal[1, 2] = 1,
    policy: PolicyConfig | None = None,
    lora: LoraConfig | None = None,
    load_s: float = LOAD_S,
) -> list[Event]:
    """Run messages to the end, checking the books after every batch of events."""
    scheduler = Scheduler(replace(config or SchedulerConfig(), overlap_depth=depth), device.capacity, policy, lora)
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        scheduler.check()
        events.extend(batch)

    run(scheduler, DeviceWorld(messages, device, depth, load_s), emit, depth)
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
