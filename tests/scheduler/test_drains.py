"""Drains as the ledger sees them: pins, chunks, loads, what remains, and who came first."""

from __future__ import annotations

import math

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import DrainChanged, Finished, Preempted
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched
from rota.core.policy_config import PolicyConfig
from rota.policy.drains import LONGEST_READ_S
from tests.builders import add_adapter, capacity, submit
from tests.fakes import FakeDevice
from tests.scheduler.stage import WAIT, Stage, loads, seated
from tests.worlds import endings, serve

DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=3.0)


def starved(remaining: int = 15, policy: PolicyConfig = DRAIN, **fields) -> Stage:
    """One slot: adapter 1 has so many tokens to go and drains, since adapter 2 has waited for too long."""
    stage = Stage(slots=1, policy=policy, **fields)
    stage.seat(1, max_new_tokens=remaining + 1)
    stage.ask("starves", adapter=2, max_new_tokens=2)
    stage.step(at=0.0)
    return stage


def test_an_adapter_drains_as_soon_as_another_has_waited_strictly_too_long():
    stage = starved(remaining=15)
    stage.ask("before", adapter=1, max_new_tokens=40)
    plan = stage.step(at=3.0)
    assert seated(plan) == ["before"]
    assert plan.wake_at == math.nextafter(3.0, 4.0)

    stage.ask("after", adapter=1, max_new_tokens=499)
    assert seated(stage.step(at=plan.wake_at)) == []
    assert "makes room for another" in stage.why("after")


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
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    return stage


def test_the_slot_that_a_drain_frees_is_kept_while_the_starving_adapter_is_read_from_disk():
    stage = known_but_not_at_hand(3, 2, 4, 3, 1)
    stage.seat(1, max_new_tokens=6)
    stage.ask("starves", adapter=2)
    assert [adapter.adapter_id for adapter in stage.step(at=3.1).fetches] == [2]
    stage.ask("retakes", adapter=1, at=-10.0, max_new_tokens=200)
    while not stage.said(Finished):
        stage.step()
    stage.ask("older and at hand", adapter=3, at=-50.0)

    plan = stage.step()
    assert (plan.seats, plan.loads) == ((), ())
    stage.tell(AdapterFetched(adapter_id=AdapterId(2), at=3.2))
    assert loads(stage.step(at=3.2)) == [2]


def reserved_and_read() -> Stage:
    """Adapter 1 has drained for adapter 2 at 3.1, which is being read from disk."""
    stage = known_but_not_at_hand(1, 2, 1)
    stage.seat(1, max_new_tokens=6)
    stage.ask("starves", adapter=2)
    stage.step(at=3.1)
    stage.ask("waits", adapter=1, max_new_tokens=200)
    while not stage.said(Finished):
        stage.step()
    assert stage.step().seats == ()
    return stage


def test_the_slot_that_a_drain_frees_is_kept_through_a_read_of_two_seconds():
    stage = reserved_and_read()
    assert stage.step(at=4.2).seats == ()
    assert stage.step(at=5.0).seats == ()
    stage.tell(AdapterFetched(adapter_id=AdapterId(2), at=5.1))

    assert loads(stage.step(at=5.1)) == [2]


def test_a_slot_is_not_kept_for_a_read_that_never_ends_and_the_drained_goes_on():
    stage = reserved_and_read()
    lapses_at = 3.1 + LONGEST_READ_S
    assert stage.step(at=lapses_at - 1.0).wake_at == lapses_at

    assert seated(stage.step(at=lapses_at)) == ["waits"], "the disk is broken"
    assert "starves" in stage.scheduler.refusals()


def test_a_slot_is_not_kept_for_a_read_that_fails():
    stage = reserved_and_read()
    stage.fail(2)

    assert seated(stage.step()) == ["waits"]


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
    assert "makes room for another" in stage.why("long")


def used_to_short_answers(longest: int) -> Stage:
    """One slot, whose adapter 1 has given 64 answers of twenty tokens. It drains for adapter 2 now."""
    stage = Stage(slots=1, policy=DRAIN, rows=80, blocks=4096, max_sequence_tokens=4096)
    for number in range(64):
        stage.ask(f"short{number}", adapter=1, max_new_tokens=3000, stop_token_ids=frozenset({9}))
    stage.step()
    stage.arrive(1)
    for step in range(1, 21):
        stage.step(token=9 if step == 20 else 7)
    assert len(stage.said(Finished)) == 64
    stage.ask("long", adapter=1, max_new_tokens=longest)
    stage.step()
    stage.ask("starves", adapter=2, max_new_tokens=2)
    stage.step(at=3.1)
    assert [(event.victim, event.beneficiary) for event in stage.said(DrainChanged)] == [(1, 2)]
    return stage


def test_a_drain_ends_at_its_deadline_though_long_answers_were_let_in_as_short_ones():
    """Twenty tokens were expected of each answer. All of these answers take three thousand."""
    stage = used_to_short_answers(longest=3000)
    for number in range(10):
        stage.ask(f"late{number}", adapter=1, max_new_tokens=3000)
    assert len(seated(stage.step())) == 10
    steps = 2
    while loads(stage.step()) != [2]:
        steps += 1
        assert steps <= 1.2 * 20

    stage.arrive(2)
    assert seated(stage.step()) == ["starves"]
    assert len(stage.step().decodes) == 1, "all of adapter 1 is parked"


def test_answers_that_a_deadline_interrupts_keep_their_kv_and_go_on():
    stage = used_to_short_answers(longest=60)
    seats, ended = [], []
    for _ in range(80):
        plan = stage.step()
        seats += seated(plan)
        ended += [event.request_id for event in stage.said(Finished)]
        stage.arrive(*loads(plan))

    assert ended == ["starves", "long"]
    assert (seats, stage.said(Preempted)) == (["starves"], []), "it never sat down again"


def test_a_prompt_in_chunks_is_work_that_a_drain_waits_for():
    stage = Stage(slots=1, policy=DRAIN, config=SchedulerConfig(chunked_prefill_size=8))
    stage.seat(1, prompt=60, max_new_tokens=2)
    stage.ask("starves", adapter=2)
    for _ in range(5):
        assert stage.step(at=3.1).loads == ()


def test_an_idle_pinned_adapter_does_not_pass_for_a_slot_that_can_be_had():
    stage = Stage(slots=2, policy=DRAIN, pinned=(1,))
    stage.step()
    stage.arrive(1)
    stage.seat(2)
    stage.ask("starves", adapter=3)
    stage.step(at=3.1)

    assert [(event.victim, event.beneficiary) for event in stage.said(DrainChanged)] == [(2, 3)]


def test_one_whose_weights_are_on_their_way_is_neither_a_victim_nor_a_free_slot():
    stage = Stage(slots=2, policy=DRAIN)
    stage.seat(1, max_new_tokens=400)
    stage.ask("comes", adapter=2, max_new_tokens=2)
    assert loads(stage.step()) == [2]
    stage.ask("starves", adapter=3)
    stage.step(at=3.1)

    assert [(event.victim, event.beneficiary) for event in stage.said(DrainChanged)] == [(1, 3)]


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
    assert "makes room for another" in stage.why("long1")


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
    assert "makes room for another" in stage.why("as long in all")


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
