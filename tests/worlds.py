"""Worlds for tests: virtual time around a device that computes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event
from rota.core.ids import BASE, AdapterId, Row
from rota.core.messages import AdapterReady, Message
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import Emit, run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from rota.sim.world import Finish, PagesOf
from tests.costs import constant_cost
from tests.fakes import FakeDevice, FakeTicket
from tests.fakes import endings as endings
from tests.fakes import outputs as outputs
from tests.scheduler.balance import check_balance

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
        super().__init__(messages, constant_cost(seconds=STEP_S, load_s=load_s, fetch_s=fetch_s), pages_of=pages_of)
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
    """Run messages to the end with a scheduler of their own."""
    config = replace(config or SchedulerConfig(), overlap_depth=depth)
    scheduler = Scheduler(config, device.capacity, policy, lora, standstill_s=math.inf)
    return run_watched(scheduler, DeviceWorld(messages, device, depth, load_s), depth)


class WatchedWorld:
    """A world that objects to a loop which sleeps while somebody could run."""

    def __init__(self, world: VirtualWorld, scheduler: Scheduler, emit: Emit) -> None:
        self._world, self._scheduler, self._emit = world, scheduler, emit
        self.now, self.submit, self.collect = world.now, world.submit, world.collect

    def receive(self, until: float) -> list[Message] | None:
        if min(until, self._world.next_at) > self.now() and not self._scheduler.is_idle:
            self._look_around(until)
        return self._world.receive(until)

    def _look_around(self, until: float) -> None:
        """Nothing is in flight, and nothing will be for a while."""
        scheduler, state = self._scheduler, self._scheduler._state
        if state.paused_at is not None:
            return
        waits = f"the loop sleeps until {until} while {scheduler.refusals()} wait"
        idle = [one.request_id for group in state.open_groups for one in group.decoding if one.planned < one.limit - 1]
        assert not idle, f"{waits}, and {idle} hold a row and a slot and are not in a step"
        is_under_way = state.slots.on_their_way or any(map(state.hosts.is_fetching, state.groups))
        assert is_under_way or until < math.inf, f"{waits}, and nothing that they wait for is under way"
        plan = scheduler.plan(self.now())
        # Beside reads that are under way, policies may want others: they look again after some passes.
        assert not {*plan.chunks, *plan.decodes, *plan.loads}, f"{waits}, but asked once more it would do {plan}"
        done = self.collect(self.submit(plan)) if plan.has_work else StepResult(at=self.now())
        self._emit(scheduler.commit(plan, done))


def run_watched(
    scheduler: Scheduler, world: VirtualWorld, depth: int, hear: Emit = lambda _: None, last: Iterable[Message] = ()
) -> list[Event]:
    """Run to the end, and again with what is told at `last`, when nobody waits and nothing is under way.

    The ledgers are checked after every batch of events, and nobody may sleep who could run. A scheduler that tells of
    standstills would wake up for them: `standstill_s` is to be infinity.
    """
    events: list[Event] = []

    def emit(batch: list[Event]) -> None:
        check_balance(scheduler)
        events.extend(batch)
        hear(batch)

    watched = WatchedWorld(world, scheduler, emit)
    run(scheduler, watched, emit, depth)
    for message in last:
        world.post(world.now(), message)
    run(scheduler, watched, emit, depth)
    check_balance(scheduler)
    assert scheduler.is_idle
    return events
