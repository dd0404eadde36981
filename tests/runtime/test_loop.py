"""The loop: every request ends, and the same scenario through both worlds gives the same events in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.capacity import Capacity
from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Event, Finished, Produced
from rota.core.messages import Message
from rota.core.plan import StepPlan, StepResult
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from tests.builders import abort, capacity, submit
from tests.costs import constant_cost
from tests.fakes import FakeDevice
from tests.worlds import DeviceWorld

# ── virtual time ──────────────────────────────────────────────────────────────────────────────────────────────────────


def traffic() -> list[tuple[float, Message]]:
    return [
        (0.0, submit("a", prompt=30, max_new_tokens=6)),
        (0.0, submit("b", prompt=5, max_new_tokens=3)),
        (3.0, submit("c", prompt=9, max_new_tokens=9, arrived_at=3.0)),
        (5.0, abort("c", at=5.0)),
        (40.0, submit("d", prompt=2, max_new_tokens=2, arrived_at=40.0)),
    ]


def serve_virtually(messages: list[tuple[float, Message]], depth: int) -> tuple[list[Event], float]:
    scheduler = Scheduler(SchedulerConfig(chunked_prefill_size=16), capacity())
    world = VirtualWorld(messages, constant_cost(seconds=1.0))
    events: list[Event] = []
    run(scheduler, world, events.extend, depth)
    return events, world.now()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_and_the_clock_jumps_over_idle_time(depth):
    events, ended_at = serve_virtually(traffic(), depth)

    assert {event.request_id for event in events if isinstance(event, Finished)} == set("abcd")
    assert 42.0 <= ended_at <= 43.0


def test_a_rerun_gives_the_same_events_to_the_bit():
    assert serve_virtually(traffic(), depth=2) == serve_virtually(traffic(), depth=2)


class Watch(VirtualWorld):
    """Notes how many steps are in flight whenever one more is submitted."""

    def __init__(self) -> None:
        super().__init__([(0.0, submit(max_new_tokens=10))], constant_cost(seconds=1.0))
        self.flying = 0
        self.most = 0

    def submit(self, plan: StepPlan):
        self.flying += 1
        self.most = max(self.most, self.flying)
        return super().submit(plan)

    def collect(self, ticket):
        self.flying -= 1
        return super().collect(ticket)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_depth_is_the_number_of_steps_in_flight(depth):
    world = Watch()
    run(Scheduler(SchedulerConfig(), capacity()), world, lambda _: None, depth)

    assert (world.most, world.flying) == (depth, 0)


def test_waiting_for_ever_is_an_error_that_names_who_waits_and_why():
    scheduler = Scheduler(SchedulerConfig(), capacity(rows=1))
    scheduler._state.rows.take()  # a row that was lost

    with pytest.raises(StuckError, match="r0: as many requests run as may run"):
        run(scheduler, VirtualWorld([(0.0, submit("r0"))], constant_cost(seconds=1.0)), lambda _: None)


def test_what_needs_no_step_is_told_before_a_step_is_waited_for():
    """Of two requests of one name the second is refused, while a step of the first is on the device."""
    told: list[Event] = []
    waits: list[bool] = []  # was the refusal told, whenever a step was waited for

    class Slow(VirtualWorld):
        def collect(self, ticket):
            waits.append(any(isinstance(event, Finished) for event in told))
            return super().collect(ticket)

    twins = [(0.0, submit("twin", max_new_tokens=4)), (1.0, submit("twin", max_new_tokens=4, arrived_at=1.0))]
    run(Scheduler(SchedulerConfig(), capacity()), Slow(twins, constant_cost(seconds=1.0)), told.extend, depth=2)

    refused = next(event for event in told if isinstance(event, Finished))
    assert refused.fault is not None
    assert waits.index(True) == sum(1 for event in told[: told.index(refused)] if isinstance(event, Produced))


# ── two worlds ────────────────────────────────────────────────────────────────────────────────────────────────────────

FOUND = capacity(blocks=12, block_size=8, rows=3)
CONFIG = SchedulerConfig(chunked_prefill_size=12)


class TimedDevice(FakeDevice):
    """Says how long its steps took, as a device does, by their tokens."""

    def collect(self, ticket) -> StepResult:
        plan = next(plan for plan in self.plans if plan.step_id == ticket.step_id)
        return replace(super().collect(ticket), step_s=0.01 + 0.005 * plan.prompt_tokens)


class ScriptedDevice(TimedDevice):
    """A live device that hands messages over after the step with their number, as virtual seconds would."""

    def __init__(self, found: Capacity, script: list[tuple[float, Message]]) -> None:
        super().__init__(found)
        self.script = sorted(script, key=lambda entry: entry[0])
        self.clock = 0.0

    def collect(self, ticket) -> StepResult:
        self.clock += 1.0
        return super().collect(ticket)

    def post(self, message: Message) -> None:
        raise AssertionError("there are no adapters here")

    def take(self, wait_s: float) -> list[Message] | None:
        """The inbox's side: what is due; one who would wait jumps to the next message."""
        if wait_s > 0 and not self.script:
            return None
        if wait_s > 0:
            self.clock = max(self.clock, self.script[0][0])
        due = [message for at, message in self.script if at <= self.clock]
        self.script = self.script[len(due) :]
        return due


def timeless(event: Event) -> Event:
    """What happened, whenever it did and however long it took."""
    return replace(event, at=0.0, step_s=0.0) if isinstance(event, Produced) else replace(event, at=0.0)


def live_events(script: list[tuple[float, Message]], depth: int) -> list[Event]:
    device, events = ScriptedDevice(FOUND, script), []
    run(Scheduler(CONFIG, FOUND), LiveWorld(device, device), events.extend, depth)
    return [timeless(event) for event in events]


def virtual_events(script: list[tuple[float, Message]], depth: int) -> list[Event]:
    events: list[Event] = []
    run(Scheduler(CONFIG, FOUND), DeviceWorld(script, FakeDevice(FOUND)), events.extend, depth)
    return [timeless(event) for event in events]


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[float, Message]]:
    script: list[tuple[float, Message]] = []
    for number in range(draw(st.integers(1, 8))):
        at = float(draw(st.integers(0, 30)))
        length, output = draw(st.integers(1, 40)), draw(st.integers(1, 20))
        script.append((at, submit(f"r{number}", prompt=length, max_new_tokens=output, arrived_at=at)))
        if draw(st.booleans()):
            left_at = at + draw(st.integers(0, 20))
            script.append((left_at, abort(f"r{number}", at=left_at)))
    return script


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60, deadline=None)
@given(script=scripts())
def test_the_same_scenario_gives_the_same_events_in_both_worlds(depth, script):
    live = live_events(script, depth)

    assert live == virtual_events(script, depth)
    assert live


@pytest.mark.parametrize("max_step_ms", ["auto", 50.0])
def test_both_worlds_are_sent_the_same_plans(max_step_ms):
    script = [(0.0, submit("a", prompt=30, max_new_tokens=30)), (5.0, submit("b", prompt=20))]
    live, virtual = ScriptedDevice(FOUND, script), TimedDevice(FOUND)
    config = replace(CONFIG, max_step_ms=max_step_ms)
    run(Scheduler(config, FOUND), LiveWorld(live, live), lambda _: None, 2)
    run(Scheduler(config, FOUND), DeviceWorld(script, virtual), lambda _: None, 2)

    assert live.plans == virtual.plans
    assert any(isinstance(plan, StepPlan) and plan.seats for plan in live.plans)
    beside = [plan.prompt_tokens for plan in live.plans if plan.decodes and plan.chunks]
    assert beside == ([11, 9] if max_step_ms == "auto" else [8, 8, 4])
