"""The scheduler says itself when requests are open and no step runs, and whether anything is under way for them."""

from __future__ import annotations

import math

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Event
from rota.core.ids import AdapterId, EngineId
from rota.core.messages import Pause
from rota.core.standstill import StoodStill, WentOn
from rota.policy.slot_policies import SLOT_POLICIES
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.scheduler.sequence import Reason
from rota.scheduler.standing import MOST_REASONS
from tests.builders import add_adapter, capacity, submit
from tests.fakes import FakeDevice
from tests.policy.never_admits import NEVER, NeverAdmits
from tests.scheduler.stage import Stage
from tests.worlds import DeviceWorld


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, NEVER.lora_policy, NeverAdmits.from_config)


def asked(*requests: str, **how) -> Stage:
    """An engine whose adapter is being copied for these requests; its policy will let none of them start."""
    stage = Stage(policy=NEVER, engine_id=EngineId(3), **how)
    for name in requests:
        stage.ask(name, adapter=1)
    stage.step(at=0.0)
    return stage


def told(stage: Stage) -> list[tuple[float, str, bool]]:
    return [(event.at, event.kind, event.is_news) for event in stage.said(StoodStill)]


def test_a_standstill_without_a_way_out_is_told_with_reasons_and_asks_for_no_pass_more():
    stage = asked(*map(str, range(MOST_REASONS + 3)))
    stage.arrive(1)
    assert [stage.step(at=at).wake_at for at in (1.0, 9.5)] == [10.0, 10.0]
    assert stage.said(StoodStill) == []

    assert [stage.step(at=at).wake_at for at in (10.0, 11.0)] == [math.inf] * 2
    (event,) = stage.said(StoodStill)
    assert (event.is_stuck, event.still_s, event.requests, event.engine_id) == (True, 10.0, MOST_REASONS + 3, 3)
    assert len(event.reasons) == MOST_REASONS
    assert event.reasons[0] == ("0", Reason.MAKING_ROOM)


def test_a_standstill_that_waits_is_told_again_when_it_has_lasted_twice_as_long_and_its_end_is_told():
    stage = asked("waits")
    assert [stage.step(at=at).wake_at for at in (10.0, 15.0, 20.0)] == [20.0, 20.0, 40.0]
    assert told(stage) == [(10.0, "waiting", True), (20.0, "waiting", False)]
    stage.leave("waits")
    stage.step(at=21.0)

    assert stage.said(WentOn) == [WentOn(21.0, 21.0, EngineId(3))]
    stage.step(at=90.0)
    assert told(stage) == []


def test_a_wait_that_ends_and_helps_nobody_is_told_at_once():
    stage = asked("waits")
    stage.step(at=10.0)
    stage.arrive(1)
    stage.step(at=13.0)

    assert told(stage) == [(10.0, "waiting", True), (13.0, "stuck", True)]


class Later(NeverAdmits):
    at = 60.0

    def ask_again_at(self, slots, now):
        return self.at


@pytest.mark.parametrize(
    ("under_way", "waits_for"),
    [
        ({"read"}, "reads of adapters (1)"),
        ({"copy"}, "copies into slots (1)"),
        ({"delay"}, "a delay of 50.0 s"),
        ({"read", "copy", "delay"}, "reads of adapters (1), copies into slots (1), a delay of 50.0 s"),
    ],
)
def test_what_is_under_way_is_named(monkeypatch, under_way, waits_for):
    if "delay" in under_way:
        monkeypatch.setitem(SLOT_POLICIES, NEVER.lora_policy, Later.from_config)
    stage = asked("waits", slots=1)
    stage.ask("has no slot", adapter=2)
    if "read" in under_way:
        stage.tell(add_adapter(4))
    if "copy" not in under_way:
        stage.arrive(1)
    for at in (0.0, 10.0):
        stage.step(at)

    (event,) = stage.said(StoodStill)
    assert event.waits_for == waits_for


@pytest.mark.parametrize(("at", "delay"), [(10.5, "a delay of 0.5 s"), (9.0, "a delay of 0.0 s")])
def test_of_a_delay_what_is_left_is_named_and_never_less_than_nothing(monkeypatch, at, delay):
    monkeypatch.setattr(Later, "at", at)
    monkeypatch.setitem(SLOT_POLICIES, NEVER.lora_policy, Later.from_config)
    stage = asked("waits", slots=1)
    stage.ask("has no slot", adapter=2)
    stage.arrive(1)
    for moment in (0.0, 10.0):
        stage.step(moment)

    (event,) = stage.said(StoodStill)
    assert event.waits_for == delay


def test_a_pause_is_no_standstill():
    stage = asked("waits")
    stage.tell(Pause(1.0))

    assert [stage.step(at=at).wake_at for at in (1.0, 100.0)] == [math.inf] * 2
    assert stage.said(StoodStill) == []


def test_virtual_time_tells_of_slow_copies_and_ends_in_an_error_where_nothing_is_under_way():
    script = [(0.0, add_adapter(1)), (1.0, submit("r", adapter=AdapterId(1), arrived_at=1.0))]
    events: list[Event] = []
    run(Scheduler(SchedulerConfig(), capacity()), DeviceWorld(script, FakeDevice(), load_s=25.0), events.extend)
    still = [type(event) for event in events if isinstance(event, StoodStill | WentOn)]
    assert still == [StoodStill, StoodStill, WentOn]

    with pytest.raises(StuckError, match="makes room for another"):
        run(Scheduler(SchedulerConfig(), capacity(), NEVER), DeviceWorld(script, FakeDevice()), events.extend)
