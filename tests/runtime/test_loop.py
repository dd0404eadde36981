from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Event, Finished, Produced
from rota.core.messages import Message
from rota.core.plan import StepPlan
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim import VirtualWorld
from tests.builders import abort, capacity, submit
from tests.costs import constant_cost


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
