"""The prefill delayer among adapters, rows and steps that are full."""

from __future__ import annotations

from dataclasses import replace

from rota.core.config import SchedulerConfig
from rota.core.events import Admitted, PrefillsReleased
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import Tenant
from tests.scheduler.stage import Stage, seated

ROTATE = PolicyConfig(lora_policy="rotate")


def delaying(policy: PolicyConfig = ROTATE, **fields) -> Stage:
    """Four base requests run and three rows are free, too few for a batch like the last: prompts are held back for
    half a second, or until a fourth row is free."""
    policy = replace(policy, enable_prefill_delayer=True, prefill_delayer_max_delay_ms=500.0)
    stage = Stage(policy=policy, **{"rows": 7, "slots": 1, **fields})
    for number in range(4):
        stage.ask(f"base{number}", prompt=1, max_new_tokens=400)
    stage.step()
    return stage


def test_new_prompts_are_held_back_until_the_bound():
    stage = delaying()
    stage.ask("held", at=1.0)
    assert stage.step(at=1.0).seats == ()
    assert stage.step(at=1.49).seats == ()

    assert seated(stage.step(at=1.5)) == ["held"]


def test_time_without_a_free_row_is_not_the_delayers_doing():
    stage = delaying(rows=4)
    stage.ask("held", at=1.0)
    stage.step(at=1.0)
    assert stage.why("held") == "as many requests run as may run"
    stage.leave("base0")
    assert stage.step(at=9.0).seats == (), "one row is free, and it has not been held back for a moment yet"
    assert stage.step(at=9.49).seats == ()

    assert seated(stage.step(at=9.5)) == ["held"]


def test_passes_without_a_free_row_are_not_the_delayers_doing_either():
    stage = delaying(policy=replace(ROTATE, prefill_delayer_max_delay_passes=4), rows=4)
    stage.ask("held", at=1.0)
    for _ in range(3):
        stage.step(at=1.0)
    stage.leave("base0")
    for _ in range(3):
        assert stage.step().seats == ()

    assert seated(stage.step()) == ["held"]


def test_a_slot_that_was_given_up_for_an_adapter_is_not_held_idle():
    stage = delaying()
    stage.ask("adapted", adapter=1, at=1.0)
    stage.step(at=1.0)
    stage.arrive(1)
    stage.ask("plain", at=1.0)

    assert seated(stage.step(at=1.01)) == ["adapted"]


def test_requests_whose_adapter_is_absent_do_not_count_as_a_queue():
    policy = PolicyConfig(lora_policy="wait", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = Stage(slots=1, rows=32, policy=policy)
    for number in range(8):
        stage.ask(f"r{number}", prompt=1, adapter=1, max_new_tokens=400)
    stage.step()
    stage.arrive(1)
    stage.step()
    for number in range(20):
        stage.ask(f"cold{number}", adapter=2)
    stage.ask("warm", adapter=1)
    assert stage.step(at=1.0).seats == (), "one could run, and four are wanted"

    for number in range(3):
        stage.ask(f"warmer{number}", adapter=1)
    assert len(stage.step(at=1.1).seats) == 4


def test_requests_of_a_tenant_that_runs_as_many_as_it_may_do_not_count_as_a_queue():
    policy = PolicyConfig(lora_policy="wait", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = Stage(slots=1, rows=32, policy=policy)
    full = Tenant(name="full", max_running=1)
    stage.ask("runs", tenant=full, max_new_tokens=400)
    for number in range(7):
        stage.ask(f"r{number}", prompt=1, adapter=1, max_new_tokens=400)
    stage.step()
    stage.arrive(1)
    stage.step()
    for number in range(9):
        stage.ask(f"waits{number}", tenant=full)
    stage.ask("warm", adapter=1)
    assert stage.step(at=1.0).seats == (), "one could run, and four are wanted"

    for number in range(3):
        stage.ask(f"warmer{number}", adapter=1)
    assert len(stage.step(at=1.1).seats) == 4


def test_no_request_is_held_back_longer_in_all_though_the_step_has_room_for_one_at_a_time():
    stage = delaying(config=SchedulerConfig(chunked_prefill_size=12))
    for id in ("first", "second", "third"):
        stage.ask(id, at=1.0, prompt=8, max_new_tokens=400)
    places, at = [], 1.0
    while len(places) < 3:
        places += [(id, round(at, 2)) for id in seated(stage.step(at=at))]
        at += 0.05

    assert [id for id, _ in places] == ["first", "second", "third"]
    assert places[0][1] == 1.5
    assert places[-1][1] <= 1.5 + 0.1, "a pass or two for the step, none for the delayer"


def test_a_prompt_that_has_begun_goes_on_whatever_the_delayer_says():
    stage = delaying(config=SchedulerConfig(chunked_prefill_size=12))
    stage.ask("long", at=1.0, prompt=30)
    stage.step(at=1.0)
    assert seated(stage.step(at=1.5)) == ["long"]
    stage.ask("held", at=1.6)
    plan = stage.step(at=1.6)

    assert plan.seats == ()
    assert [chunk.length for chunk in plan.chunks] == [8]


def test_requests_that_lack_kv_are_not_released_again_and_again():
    """Two requests hold nearly all blocks, and twenty wait for theirs: a release is told when one can start."""
    policy = PolicyConfig(lora_policy="wait", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = Stage(slots=1, rows=32, blocks=12, policy=policy)
    for number in range(22):
        stage.ask(f"r{number}", prompt=64, max_new_tokens=30, at=0.01 * number)
    for number in range(400):
        stage.step(at=1.0 + 0.01 * number)
    releases, admissions = stage.said(PrefillsReleased), stage.said(Admitted)

    assert len(admissions) >= 22, "all of them have run"
    assert len(releases) <= len(admissions)


def test_a_short_request_that_could_start_counts_though_the_first_of_its_queue_lacks_kv():
    policy = PolicyConfig(lora_policy="wait", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    stage = Stage(slots=1, rows=32, blocks=12, policy=policy)
    stage.ask("holds", prompt=64, max_new_tokens=100)
    stage.step()
    stage.ask("large", prompt=200, at=1.0)
    stage.ask("small", prompt=16, at=1.1)

    assert seated(stage.step(at=1.2)) == ["small"]
