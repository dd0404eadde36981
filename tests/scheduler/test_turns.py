from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Finished, Preempted, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched
from rota.core.policy_config import PolicyConfig
from tests.builders import add_adapter, capacity, submit
from tests.fakes import FakeDevice
from tests.scheduler.stage import WAIT, Stage, loads, seated
from tests.worlds import endings, outputs, serve

ROTATE = PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=1000.0, lora_max_stall_ms=2000.0)
DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=3.0)


def left(stage: Stage) -> list[int]:
    """Who has left a slot since we last looked."""
    return [event.adapter_id for event in stage.said(SlotChanged) if event.state is SlotState.EMPTY]


# ── slots change hands ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_slot_is_taken_before_an_idle_one():
    stage = Stage(slots=2)
    stage.seat(1, max_new_tokens=1)
    stage.ask("r", adapter=2)
    stage.step()

    assert left(stage) == []


@pytest.mark.parametrize(("policy", "leaver"), [("lru", 2), ("fifo", 1)])
def test_of_idle_tenants_the_eviction_policy_says_who_leaves(policy, leaver):
    stage = Stage(slots=2, lora=LoraConfig(lora_eviction_policy=policy))
    stage.seat(1, 2, max_new_tokens=1)
    stage.ask("again", adapter=1, max_new_tokens=1)
    stage.step()
    stage.ask("newcomer", adapter=3)
    stage.step()

    assert left(stage) == [leaver]


def test_a_tenant_that_runs_never_leaves_under_wait():
    stage = Stage(slots=1, policy=WAIT)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    for second in range(300):
        assert len(stage.step(at=float(second)).decodes) == 1

    assert left(stage) == []


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_a_pinned_tenant_keeps_its_slot_though_it_is_idle(policy):
    stage = Stage(adapters=3, slots=2, pinned=(1,), policy=policy)
    stage.step()
    stage.arrive(1)
    stage.ask("second", adapter=2, max_new_tokens=400)
    stage.ask("third", adapter=3, max_new_tokens=400)
    for second in range(12):
        for load in stage.step(at=float(second)).loads:
            stage.arrive(load.adapter_id)

    assert 1 not in left(stage)


def test_rotation_never_starts_while_slots_suffice():
    messages = [(0.0, add_adapter(number)) for number in (1, 2, 3)]
    messages += [
        (float(number), submit(f"r{number}-{turn}", adapter=AdapterId(number), max_new_tokens=40, arrived_at=number))
        for number in (1, 2, 3)
        for turn in range(2)
    ]
    events = serve(messages, FakeDevice(capacity(slots=3)), policy=ROTATE)

    assert [event for event in events if isinstance(event, SlotChanged) and event.state is SlotState.EMPTY] == []


def test_nobody_steps_aside_for_a_request_that_could_not_start_anyway():
    stage = Stage(slots=1, policy=ROTATE, rows=1)
    stage.seat(1)
    stage.ask("no row for it", adapter=2)
    for second in range(1, 10):
        assert stage.step(at=float(second)).loads == ()


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_leaver_runs_until_the_comer_is_there():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    assert loads(stage.step(at=1.0)) == [2]
    for _ in range(3):
        assert len(stage.step().decodes) == 1, "no step waits for a copy"

    stage.arrive(2)
    plan = stage.step()
    assert (plan.decodes, seated(plan)) == ((), ["newcomer"])
    assert left(stage) == [1]


def test_a_parked_sequence_keeps_its_kv_and_goes_on_where_it_was():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("newcomer", adapter=2, max_new_tokens=1)
    stage.step(at=1.0)
    stage.arrive(2)
    stage.step()
    assert loads(stage.step()) == [1], "its slot is idle, and adapter 1 comes back at once"
    stage.arrive(1)
    plan = stage.step()

    assert (len(plan.decodes), plan.seats, plan.chunks) == (1, (), ())
    assert stage.said(Preempted) == []


def test_without_overlap_two_change_places_in_one_step():
    stage = Stage(slots=1, policy=ROTATE, lora=LoraConfig(enable_lora_overlap_loading=False))
    stage.ask("first", adapter=1, max_new_tokens=400)
    stage.step()
    stage.ask("second", adapter=2)
    plan = stage.step(at=1.0)

    assert (loads(plan), seated(plan), plan.decodes) == ([2], ["second"], ())


def test_a_turn_is_called_off_when_those_it_came_for_are_gone():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("gone", adapter=2)
    stage.step(at=1.0)
    stage.leave("gone")
    stage.arrive(2)

    assert len(stage.step().decodes) == 1
    assert left(stage) == [2]
    stage.ask("next", adapter=3)
    assert loads(stage.step(at=2.0)) == [3], "the landing is free again"


def test_a_turn_that_fails_leaves_the_present_tenant_where_it_is():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("unlucky", adapter=2)
    stage.step(at=1.0)
    stage.fail(2)

    assert len(stage.step().decodes) == 1
    assert left(stage) == [2]


def test_a_tenant_that_is_unloaded_while_its_successor_lands_leaves_for_good():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    stage.step(at=1.0)
    stage.unload(1, is_forced=True)
    stage.arrive(2)

    assert seated(stage.step()) == ["newcomer"]
    assert left(stage) == [1]


def test_a_scheduler_with_nothing_to_run_asks_again_when_a_turn_is_over():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)

    assert stage.step(at=0.25).wake_at == 1.0


def test_parked_sequences_are_the_first_to_give_up_kv_the_newest_before_the_oldest():
    stage = Stage(adapters=2, slots=1, policy=ROTATE, blocks=12, rows=6)
    for id, at in (("old", 0.0), ("new", 0.1)):
        stage.ask(id, adapter=1, at=at, prompt=31, max_new_tokens=400)
    stage.step()
    stage.arrive(1)
    stage.step()
    stage.ask("grows", adapter=2, at=0.2, prompt=46, max_new_tokens=400)
    stage.step(at=1.0)
    stage.arrive(2)
    preempted: list[str] = []
    while len(preempted) < 2:
        stage.step()
        preempted += [event.request_id for event in stage.said(Preempted)]

    assert preempted == ["new", "old"]


# ── drains ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def starved(remaining: int = 15, policy: PolicyConfig = DRAIN, **fields) -> Stage:
    """One slot: adapter 1 has so many tokens to go and drains, since adapter 2 has waited for too long."""
    stage = Stage(slots=1, policy=policy, **fields)
    stage.seat(1, max_new_tokens=remaining + 1)
    stage.ask("starves", adapter=2, max_new_tokens=2)
    stage.step(at=0.0)
    return stage


def test_an_adapter_drains_as_soon_as_another_has_waited_strictly_too_long():
    stage = starved(remaining=15)
    stage.ask("before", adapter=1, max_new_tokens=400)
    plan = stage.step(at=3.0)
    assert seated(plan) == ["before"]
    assert plan.wake_at == math.nextafter(3.0, 4.0)

    stage.ask("after", adapter=1, max_new_tokens=499)
    assert seated(stage.step(at=plan.wake_at)) == []
    assert "drains for another" in stage.why("after")


def test_a_draining_adapter_lets_the_short_pass_the_long():
    stage = starved(remaining=15)
    stage.step(at=3.1)
    stage.ask("a long one", adapter=1, max_new_tokens=20)
    stage.ask("b short one", adapter=1, max_new_tokens=10)

    assert seated(stage.step()) == ["b short one"]


def test_the_slot_that_a_drain_frees_goes_to_who_starved_though_the_drained_has_older_requests():
    stage = starved(remaining=5)
    stage.step(at=3.1)
    stage.ask("older", adapter=1, at=-50.0, max_new_tokens=200)
    while not stage.said(Finished):
        assert stage.step().loads == ()

    assert loads(stage.step()) == [2]


def known_but_not_at_hand(host_adapters: int, *adapters: int) -> Stage:
    """One slot, and room in host memory for the last of the adapters that were added."""
    stage = Stage(adapters=0, slots=1, policy=DRAIN, lora=LoraConfig(max_loaded_loras=host_adapters))
    for number in adapters:
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(AdapterId(number), 0.0))
    return stage


def test_the_slot_that_a_drain_frees_is_kept_while_the_starving_adapter_is_read_from_disk():
    stage = known_but_not_at_hand(2, 2, 3, 1)
    stage.seat(1, max_new_tokens=6)
    stage.ask("starves", adapter=2)
    stage.step(at=3.1)
    stage.ask("retakes", adapter=1, at=-10.0, max_new_tokens=200)
    while not stage.said(Finished):
        stage.step()
    stage.ask("older and at hand", adapter=3, at=-50.0)

    plan = stage.step()
    assert [adapter.adapter_id for adapter in plan.fetches] == [2]
    assert (plan.seats, plan.loads) == ((), ())
    stage.tell(AdapterFetched(AdapterId(2), 3.2))
    assert loads(stage.step(at=3.2)) == [2]


def test_a_reservation_lapses_and_the_drained_goes_on():
    stage = known_but_not_at_hand(1, 2, 1)
    stage.seat(1, max_new_tokens=6)
    stage.ask("starves", adapter=2)
    stage.step(at=3.1)
    stage.ask("waits", adapter=1, max_new_tokens=200)
    while not stage.said(Finished):
        stage.step()
    plan = stage.step()
    assert plan.seats == ()
    assert plan.wake_at == 4.1

    assert seated(stage.step(at=4.1)) == ["waits"], "the disk was too slow"


@pytest.mark.parametrize("how", ["cancelled", "unloaded"])
def test_a_drain_is_called_off_when_nobody_starves_any_more(how):
    stage = starved(remaining=15)
    stage.step(at=3.1)
    stage.ask("long", adapter=1, max_new_tokens=400)
    assert seated(stage.step()) == []
    if how == "cancelled":
        stage.leave("starves")
    else:
        stage.unload(2, is_forced=True)

    assert seated(stage.step()) == ["long"]


def test_who_lacks_kv_as_well_as_a_slot_does_not_starve():
    stage = Stage(slots=1, policy=DRAIN, blocks=8)
    stage.seat(1, prompt=40, max_new_tokens=60)
    stage.ask("too large for now", adapter=2, prompt=100)
    stage.step(at=9.0)
    stage.ask("long", adapter=1, max_new_tokens=100)

    assert seated(stage.step()) == ["long"]


def test_a_drain_outlasts_a_moment_without_kv():
    """Were it called off and begun anew, its deadline would move each time."""
    stage = Stage(slots=1, policy=DRAIN, blocks=12)
    stage.seat(1, max_new_tokens=40)
    stage.ask("starves", adapter=2, prompt=60)
    stage.step(at=3.1)
    stage.ask("takes what is left", prompt=100, max_new_tokens=3)
    assert seated(stage.step()) == ["takes what is left"]
    stage.ask("long", adapter=1, max_new_tokens=100)

    assert stage.step().seats == ()
    assert "drains for another" in stage.why("long")


def test_a_prompt_in_chunks_is_work_that_a_drain_waits_for():
    stage = Stage(slots=1, policy=DRAIN, config=SchedulerConfig(chunked_prefill_size=8))
    stage.seat(1, prompt=60, max_new_tokens=2)
    stage.ask("starves", adapter=2)
    for _ in range(5):
        assert stage.step(at=3.1).loads == ()


def test_past_answers_tell_more_than_the_limit_that_clients_ask_for():
    """Adapter 1 may write 480 tokens more but its answers end after 3; adapter 2 is known to use its 40."""
    stage = Stage(slots=2, policy=DRAIN)
    stage.seat(1, 2, max_new_tokens=40, stop_token_ids=frozenset({9}))
    for _ in range(2):
        stage.step()
    stage.leave("runs2")
    stage.step(token=9)
    stage.ask("a", adapter=1, max_new_tokens=480)
    stage.ask("b", adapter=2, max_new_tokens=40)
    stage.step()
    stage.ask("starves", adapter=3)
    stage.step(at=3.1)
    for adapter in (1, 2):
        stage.ask(f"long{adapter}", adapter=adapter, prompt=8, max_new_tokens=40)
    assert seated(stage.step()) == ["long2"]
    assert "drains for another" in stage.why("long1")


def test_a_preempted_request_is_judged_by_what_remains():
    """It has sixteen of its thirty tokens to go, and the drain eighteen steps."""
    stage = Stage(slots=1, policy=DRAIN, blocks=12)
    stage.ask("hog", at=0.0, prompt=49, max_new_tokens=400)
    for id, at in (("old", 0.1), ("young", 0.2)):
        stage.ask(id, adapter=1, at=at, prompt=46, max_new_tokens=30)
    stage.step()
    stage.arrive(1)
    while not stage.said(Preempted):
        stage.step(at=0.2)
    stage.leave("hog")
    stage.ask("starves", adapter=2, at=0.0)
    stage.ask("as long in all", adapter=1, at=0.3, prompt=46, max_new_tokens=30)

    assert seated(stage.step(at=3.1)) == ["young"]
    assert "drains for another" in stage.why("as long in all")


def test_an_endless_stream_to_one_adapter_does_not_keep_another_out():
    """The victim's requests overlap for ever; the drain's deadline stands."""
    stream = [
        (float(at), submit(f"stream{at:03}", adapter=AdapterId(1), max_new_tokens=40, arrived_at=float(at)))
        for at in range(0, 400, 8)
    ]
    starving = submit("starves", adapter=AdapterId(2), max_new_tokens=2, arrived_at=10.0)
    messages = [(0.0, add_adapter(1)), (0.0, add_adapter(2)), *stream, (10.0, starving)]
    ended_at = {}
    for policy in (DRAIN, WAIT):
        events = serve(messages, FakeDevice(capacity(slots=1)), policy=policy)
        ended_at[policy.lora_policy] = endings(events)["starves"].at

    assert ended_at["wait"] > 400.0
    assert ended_at["drain"] < 10.0 + 3.0 + 1.2 * 40 + 6.0


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_answers_are_the_same_whoever_takes_turns(policy):
    messages = [(0.0, add_adapter(number)) for number in range(1, 5)]
    messages += [
        (float(turn), submit(f"r{turn}", adapter=AdapterId(turn % 5), max_new_tokens=25, arrived_at=float(turn)))
        for turn in range(12)
    ]
    alone = serve(messages, FakeDevice(capacity(slots=4)), policy=WAIT)

    assert outputs(serve(messages, FakeDevice(capacity(slots=1)), policy=policy)) == outputs(alone)


# ── the prefill delayer among adapters ───────────────────────────────────────────────────────────────────────────────


def delaying(policy: PolicyConfig = ROTATE, **fields) -> Stage:
    """A stage on which three base requests run and three rows are free, too few for a batch like the last: prompts
    are held back for up to half a second, or until a fourth row is free."""
    policy = replace(
        policy,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=1000,
        prefill_delayer_max_delay_ms=500.0,
    )
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
