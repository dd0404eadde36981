from __future__ import annotations

from collections.abc import Iterable

import pytest

from rota.core.config import SchedulerConfig
from rota.core.events import (
    AdapterStanding,
    Admitted,
    CacheFlushed,
    Explained,
    Inspected,
    SlotChanged,
    SlotState,
    Whereabouts,
)
from rota.core.ids import RequestId
from rota.core.messages import Explain, FlushCache, Inspect
from rota.core.plan import StepResult
from rota.core.policy_config import PolicyConfig
from rota.scheduler import Scheduler
from rota.scheduler.sequence import Reason
from tests.builders import capacity, submit
from tests.scheduler.stage import Stage, loads


def explained(stage: Stage, id: str) -> Explained:
    stage.tell(Explain(RequestId(id), stage.now))
    stage.step()
    return stage.said(Explained)[-1]


def inspected(stage: Stage) -> Inspected:
    stage.tell(Inspect(stage.now))
    stage.step()
    return stage.said(Inspected)[-1]


def test_a_waiting_request_learns_why_since_when_and_who_is_before_it():
    stage = Stage(adapters=2, slots=1)
    stage.seat(1)
    for number, at in enumerate((0.1, 0.2)):
        stage.ask(f"cold{number}", adapter=2, at=at)
    stage.step(at=0.5)

    answer = explained(stage, "cold1")
    assert (answer.state, answer.reason) == (Whereabouts.WAITING, Reason.NOT_IN_SLOT)
    assert (answer.since, answer.position) == (0.2, 1)
    assert explained(stage, "cold0").position == 0


def test_a_request_waits_for_a_reason_since_that_became_the_reason():
    stage = Stage(adapters=0, rows=2, blocks=32)
    stage.ask("long", prompt=400, max_new_tokens=100)
    stage.ask("short", max_new_tokens=100)
    stage.step()
    stage.ask("waits", prompt=200, at=1.0)
    for at in (1.0, 1.5):
        stage.step(at=at)
        answer = explained(stage, "waits")
        assert (answer.reason, answer.since) == (Reason.NO_ROW, 1.0)

    stage.leave("short")
    for at in (2.0, 2.5):
        stage.step(at=at)
        answer = explained(stage, "waits")
        assert (answer.reason, answer.since) == (Reason.NO_KV, 2.0)


def test_one_that_runs_and_one_that_nobody_knows_say_so():
    stage = Stage(adapters=1, slots=1)
    stage.seat(1)

    assert explained(stage, "runs1").state is Whereabouts.RUNNING
    assert explained(stage, "nobody").state is Whereabouts.UNKNOWN


def test_one_whose_adapter_made_room_for_another_is_parked_since_it_last_ran():
    stage = Stage(adapters=2, policy=PolicyConfig(lora_rotation_quantum_ms=100.0), slots=1)
    stage.seat(1)
    stage.step(at=0.75)
    stage.ask("cold", adapter=2)
    stage.step(at=1.0)
    stage.arrive(2)

    answer = explained(stage, "runs1")
    assert (answer.state, answer.since) == (Whereabouts.PARKED, 0.75)


def test_an_inspection_counts_who_waits_runs_and_is_parked_for_each_adapter_in_use():
    stage = Stage(adapters=3, slots=1)
    stage.seat(1)
    stage.ask("cold", adapter=2, at=0.25)
    stage.ask("base", at=0.5)

    answer = inspected(stage)
    stands = {one.adapter_id: (one.waiting, one.running, one.parked, one.oldest_at) for one in answer.adapters}
    assert stands == {0: (1, 0, 0, 0.5), 1: (0, 1, 0, None), 2: (1, 0, 0, 0.25)}
    assert (answer.steps, answer.rows, answer.slots) == (3, 1, 1)
    assert 0 < answer.blocks_used < answer.blocks


def test_whoever_is_admitted_can_say_what_it_waited_for():
    stage = Stage(adapters=2, slots=1)
    stage.ask("warm", adapter=1, at=0.0, max_new_tokens=1)
    stage.step(at=0.5)
    stage.arrive(1)
    stage.step(at=0.75)

    (admitted,) = stage.said(Admitted)
    assert admitted.reasons == (Reason.NOT_IN_SLOT,)

    stage.ask("next", adapter=1, at=0.75)
    stage.step(at=0.75)
    (admitted,) = stage.said(Admitted)
    assert admitted.reasons == ()


@pytest.mark.parametrize(("asked_at", "reasons"), [(0.25, (Reason.NOT_IN_SLOT,)), (0.5, ()), (0.75, ())])
def test_a_request_has_waited_for_a_slot_if_it_came_before_its_adapter_was_there(asked_at, reasons):
    stage = Stage(adapters=1, slots=1)
    stage.ask("warm", adapter=1, at=0.0)
    stage.step(at=0.5)
    stage.arrive(1)
    stage.ask("next", adapter=1, at=asked_at)
    stage.step(at=1.0)

    assert {one.request_id: one.reasons for one in stage.said(Admitted)}["next"] == reasons


def test_a_step_that_only_computes_a_prompt_tells_how_long_it_took():
    scheduler = Scheduler(SchedulerConfig(chunked_prefill_size=32), capacity())
    scheduler.apply(submit("long", prompt=48))
    (admitted, first) = scheduler.commit(scheduler.plan(1.0), StepResult(at=1.25))
    (second,) = scheduler.commit(scheduler.plan(1.25), StepResult(at=2.0, tokens=(7,)))

    assert isinstance(admitted, Admitted)
    assert (first.tokens, first.prompt_tokens, first.step_s) == ((), 32, 0.25)
    assert (second.tokens, second.prompt_tokens, second.step_s) == ((7,), 16, 0.75)


def test_a_step_that_was_planned_while_another_ran_began_when_that_one_ended():
    scheduler = Scheduler(SchedulerConfig(), capacity())
    scheduler.apply(submit("r"))
    first, second = scheduler.plan(1.0), scheduler.plan(1.0)
    scheduler.commit(first, StepResult(at=2.0, tokens=(7,)))
    (produced,) = scheduler.commit(second, StepResult(at=2.5, tokens=(7,)))

    assert produced.step_s == 0.5


def test_a_flushed_cache_finds_nothing_of_earlier_prompts():
    stage = Stage(adapters=0)
    stage.ask("first", prompt=64, max_new_tokens=1)
    stage.step()
    stage.tell(FlushCache(stage.now))
    stage.step()
    (flushed,) = stage.said(CacheFlushed)
    assert flushed.blocks == 4

    stage.said(Admitted)
    stage.ask("again", prompt=64, max_new_tokens=1)
    stage.step()
    (admitted,) = stage.said(Admitted)
    assert admitted.cached_tokens == 0


def outlooks(stage: Stage) -> dict[int, str]:
    return {one.adapter_id: one.outlook for one in inspected(stage).adapters}


def after_visits() -> Stage:
    """One slot: adapter 1 is settled in it. Adapters 2 to 5, each a little younger, have had their first token."""
    stage = Stage(6, PolicyConfig(lora_policy="rotate"), slots=1, rows=16)
    stage.seat(1)
    for number in range(2, 6):
        stage.ask(f"late{number}", adapter=number, max_new_tokens=400, at=0.0001 * number)
    for _ in range(24):
        stage.arrive(*loads(stage.step(at=stage.now + 0.001)))
    return stage


def test_a_parked_request_learns_whether_its_adapter_comes_back_or_how_many_are_before_it():
    stage = after_visits()
    assert outlooks(stage) == {
        0: "",
        1: "",
        2: "its adapter is next in line",
        3: "its adapter waits behind 1 other",
        4: "its adapter waits behind 2 others",
        5: "its adapter waits behind 3 others",
    }
    assert explained(stage, "late4").outlook == "its adapter waits behind 2 others"

    stage.ask("visits", adapter=6)
    stage.said(SlotChanged)
    while 1 not in {event.adapter_id for event in stage.said(SlotChanged) if event.state is SlotState.EMPTY}:
        stage.step(at=stage.now + 0.001)
    assert explained(stage, "runs1").outlook == "its adapter is settled and comes back when a visit is over"


def test_under_wait_the_line_is_by_age_and_the_first_of_it_is_next():
    stage = Stage(adapters=4, slots=1)
    stage.seat(1)
    for number in (2, 3, 4):
        stage.ask(f"cold{number}", adapter=number, at=0.1 * number)

    assert explained(stage, "cold2").outlook == "its adapter is next in line"
    assert explained(stage, "cold4").outlook == "its adapter waits behind 2 others"
    assert explained(stage, "runs1").outlook == ""
    assert outlooks(stage) == {
        0: "",
        1: "",
        2: "its adapter is next in line",
        3: "its adapter waits behind 1 other",
        4: "its adapter waits behind 2 others",
    }


def test_a_tenant_is_not_told_how_many_adapters_of_others_wait():
    stage = Stage(adapters=4, slots=1)
    stage.seat(1)
    for number in (2, 3, 4):
        stage.ask(f"cold{number}", adapter=number, at=0.1 * number, tenant=f"tenant{number}")

    assert explained(stage, "cold4").outlook == "its adapter waits behind others"


@pytest.mark.parametrize("only", [(), (1,), (2,), (1, 2, 3), (3, 9)])
def test_numbers_of_some_adapters_and_of_the_others_in_sum_are_those_of_all(only):
    stage = after_visits()
    stage.ask("cold", adapter=2, at=0.25)
    stage.ask("colder", adapter=3, at=0.5)
    stage.ask("coldest", adapter=6, at=0.6)
    stage.ask("base", at=0.75)
    stage.tell(Inspect(stage.now))
    stage.tell(Inspect(stage.now, only))
    stage.step()
    whole, brief = stage.said(Inspected)

    def numbers(standings: Iterable[AdapterStanding]) -> tuple[int, int, int, float | None]:
        ones = list(standings)
        oldest = [one.oldest_at for one in ones if one.oldest_at is not None]
        return (
            sum(one.waiting for one in ones),
            sum(one.running for one in ones),
            sum(one.parked for one in ones),
            min(oldest, default=None),
        )

    assert sum(one.parked for one in whole.adapters) == 4
    told = {0, *only} & {*range(7)}
    assert {one.adapter_id for one in brief.adapters} == told
    assert (whole.is_whole, brief.is_whole) == (True, False)
    assert numbers(brief.adapters) == numbers(one for one in whole.adapters if one.adapter_id in told)
    assert numbers([brief.others]) == numbers(one for one in whole.adapters if one.adapter_id not in told)
    assert set(brief.absent) == {2, 3, 4, 5, 6}
