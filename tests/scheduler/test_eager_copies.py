"""A step uses a slot whose copy is under way where the copy hides behind a step, and nowhere else."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import FaultCode
from rota.core.events import AdapterRemoved, Finished, SlotChanged, SlotReason, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterReady
from rota.core.plan import NO_TOKEN, StepPlan, StepResult
from tests.builders import add_adapter, capacity, submit
from tests.fakes import FakeDevice
from tests.scheduler.stage import Stage, loads, seated
from tests.worlds import STEP_S, DeviceWorld, serve

QUICK_S, SLOW_S = 0.5 * STEP_S, 1.5 * STEP_S


def second(stage: Stage) -> StepPlan:
    """A step that takes a second."""
    plan = stage.scheduler.plan(stage.now)
    stage.now += STEP_S
    stage.finish(plan)
    return plan


def at_work(copy_s: float, depth: int = 2, slots: int = 2) -> Stage:
    """A request of the base model runs, and adapter 1 was copied in `copy_s` seconds and is idle."""
    config = SchedulerConfig(overlap_depth=depth)
    stage = Stage(adapters=4, slots=slots, config=config, blocks=512, max_sequence_tokens=2048)
    stage.ask("base", max_new_tokens=1500)
    stage.ask("first", adapter=1, max_new_tokens=1)
    assert loads(second(stage)) == [1]
    stage.arrive(1, copy_s=copy_s)
    for _ in range(40):
        second(stage)
    return stage


def ended(stage: Stage) -> dict[str, FaultCode | None]:
    return {end.request_id: end.fault and end.fault.code for end in stage.said(Finished)}


# ── which copies a step waits for ────────────────────────────────────────────────────────────────────────────────────


def test_the_step_after_the_order_uses_a_slot_if_copies_are_shorter_than_steps():
    stage = at_work(QUICK_S)
    stage.ask("newcomer", adapter=2)
    plan = second(stage)
    assert (loads(plan), seated(plan)) == ([2], []), "not the step that orders the copy"

    plan = second(stage)
    assert (seated(plan), len(plan.decodes)) == (["newcomer"], 1)
    changes = [event.state for event in stage.said(SlotChanged) if event.adapter_id == 2]
    assert changes == [SlotState.LOADING, SlotState.READY]


@pytest.mark.parametrize(("copy_s", "depth"), [(SLOW_S, 2), (QUICK_S, 1), (0.0, 2)], ids=["slow", "depth 1", "unknown"])
def test_otherwise_its_own_rows_wait_for_the_message_and_all_others_go_on(copy_s, depth):
    stage = at_work(copy_s, depth)
    stage.ask("resident", adapter=1, max_new_tokens=400)
    second(stage)
    stage.ask("newcomer", adapter=2)
    assert loads(second(stage)) == [2]
    for _ in range(5):
        plan = second(stage)
        assert (seated(plan), len(plan.decodes)) == ([], 2)
    assert stage.why("newcomer") == "its adapter is not in a slot"

    stage.arrive(2, copy_s=copy_s)
    assert seated(second(stage)) == ["newcomer"]


def test_an_adapter_that_takes_longer_than_others_to_copy_waits_for_its_message_alone():
    """Adapters differ in rank: the mean of all copies says little of the largest one."""
    stage = at_work(QUICK_S)
    stage.ask("large", adapter=2, max_new_tokens=1)
    second(stage)
    second(stage)
    stage.arrive(2, copy_s=SLOW_S)
    for number in (3, 4):  # both idle residents make room
        stage.ask(f"small{number}", adapter=number, max_new_tokens=1)
        second(stage)
        assert seated(second(stage)) == [f"small{number}"]
        stage.arrive(number, copy_s=QUICK_S)

    stage.ask("large again", adapter=2)
    assert loads(second(stage)) == [2]
    for _ in range(3):
        plan = second(stage)
        assert (seated(plan), len(plan.decodes)) == ([], 1)
    stage.arrive(2, copy_s=SLOW_S)
    assert seated(second(stage)) == ["large again"]


def test_only_as_many_copies_hide_behind_a_step_as_are_complete_when_it_ends():
    stage = at_work(QUICK_S - 0.1 * STEP_S, slots=4)
    for number in (2, 3, 4):
        stage.ask(f"r{number}", adapter=number)
    assert loads(second(stage)) == [2, 3, 4]

    assert seated(second(stage)) == ["r2", "r3"]
    assert seated(second(stage)) == ["r4"]


@pytest.mark.parametrize(
    ("depth", "load_s", "is_allowed"), [(2, QUICK_S, True), (1, QUICK_S, False), (2, SLOW_S, False)]
)
def test_the_world_of_the_storms_objects_to_a_slot_that_is_used_too_early(depth, load_s, is_allowed):
    device = FakeDevice(capacity(slots=1))
    serve([(0.0, add_adapter(1)), (0.0, submit("r", adapter=AdapterId(1)))], device)
    order = next(plan for plan in device.plans if plan.loads)
    start = next(plan for plan in device.plans if plan.seats)

    with pytest.raises(AssertionError, match="copy is not complete"):
        DeviceWorld([], FakeDevice(device.capacity), depth, load_s).submit(replace(start, loads=order.loads))
    world = DeviceWorld([], FakeDevice(device.capacity), depth, load_s)
    world.submit(order)
    with nullcontext() if is_allowed else pytest.raises(AssertionError, match="copy is not complete"):
        world.submit(start)


# ── copies that go wrong, or that no request wants any more ──────────────────────────────────────────────────────────


@pytest.fixture
def eager() -> tuple[Stage, StepPlan]:
    """A step in flight that uses adapter 2, whose copy no message has told of."""
    stage = at_work(QUICK_S)
    stage.ask("begun", adapter=2)
    second(stage)
    plan = stage.scheduler.plan(stage.now)
    assert seated(plan) == ["begun"]
    stage.ask("waits", adapter=2)
    return stage, plan


def test_a_copy_that_fails_under_a_step_ends_its_requests_once_and_with_the_reason(eager):
    stage, plan = eager
    stage.fail(2, "the copy went wrong")
    assert stage.scheduler.plan(stage.now).decodes, "the base model's request goes on"
    tokens = (7, NO_TOKEN)
    assert len(plan.sampled_rows) == len(tokens)
    stage.events += stage.scheduler.commit(plan, StepResult(at=stage.now, tokens=tokens))

    (first, last) = stage.said(Finished)[-2:]
    assert {first.request_id, last.request_id} == {"begun", "waits"}
    assert {end.fault.message for end in (first, last)} == {"the copy went wrong"}
    assert stage.said(SlotChanged)[-1].reason is SlotReason.FAILED


def test_the_slot_of_a_copy_that_failed_under_a_step_serves_the_next_adapter(eager):
    stage, plan = eager
    stage.fail(2)
    stage.finish(plan)
    assert ended(stage)["begun"] is FaultCode.ADAPTER_FAILED
    stage.ask("next", adapter=3)
    assert loads(second(stage)) == [3]
    assert seated(second(stage)) == ["next"]


def test_late_messages_of_an_adapter_that_is_gone_are_harmless_and_its_time_counts(eager):
    stage, plan = eager
    stage.finish(plan)
    stage.unload(2, is_forced=True)
    stage.step()
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [2]

    stage.tell(AdapterReady(AdapterId(2), stage.now, 40.0))
    stage.fail(2)
    stage.ask("next", adapter=3)
    assert loads(second(stage)) == [3]
    assert seated(second(stage)) == [], "that copy took 40 s"


@pytest.mark.parametrize("is_forced", [False, True])
def test_an_adapter_that_is_unloaded_while_it_is_copied_goes_when_the_copy_is_complete(is_forced):
    stage = at_work(QUICK_S)
    stage.ask("gone", adapter=2)
    assert loads(second(stage)) == [2]
    stage.leave("gone")
    stage.unload(2, is_forced)
    second(stage)
    assert stage.said(AdapterRemoved) == []

    stage.arrive(2, copy_s=QUICK_S)
    second(stage)
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [2]


def test_a_request_that_leaves_during_the_copy_frees_the_slot_one_step_later():
    stage = at_work(QUICK_S, slots=1)
    stage.ask("gone", adapter=2)
    assert loads(second(stage)) == [2]
    stage.leave("gone")
    stage.ask("next", adapter=3)

    assert loads(second(stage)) == [3], "the copies into one slot are made in their order"
    assert seated(second(stage)) == ["next"]
