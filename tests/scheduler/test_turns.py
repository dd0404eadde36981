from __future__ import annotations

import pytest

from rota.core.config import LoraConfig
from rota.core.events import Preempted, SlotChanged, SlotState
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.core.tenant import Tenant
from rota.policy.slot_policies import SLOT_POLICIES
from rota.policy.slot_policy import SlotPolicy
from tests.builders import add_adapter, capacity, submit
from tests.fakes import FakeDevice
from tests.policy.newest_first import NewestFirst
from tests.scheduler.stage import WAIT, Stage, loads, seated
from tests.worlds import outputs, serve

ROTATE = PolicyConfig(lora_policy="rotate")
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
def test_of_idle_residents_the_eviction_policy_says_who_leaves(policy, leaver):
    stage = Stage(slots=2, lora=LoraConfig(lora_eviction_policy=policy))
    stage.seat(1, 2, max_new_tokens=1)
    stage.ask("again", adapter=1, max_new_tokens=1)
    stage.step()
    stage.ask("newcomer", adapter=3)
    stage.step()

    assert left(stage) == [leaver]


@pytest.mark.parametrize(("asked_at", "leaver"), [((2.0, 3.0), 2), ((3.0, 2.0), 1)])
def test_of_residents_whose_requests_cannot_start_the_one_with_the_youngest_leaves(asked_at, leaver):
    """Their tenant runs as many as it may: a request of the base model."""
    full = Tenant(name="full", max_running=1)
    stage = Stage(slots=2)
    stage.seat(1, 2, max_new_tokens=1)
    stage.ask("holds", tenant=full, max_new_tokens=400)
    stage.step()
    for adapter, at in zip((1, 2), asked_at, strict=True):
        stage.ask(f"waits{adapter}", adapter, at=at, tenant=full)
    stage.step(at=4.0)
    stage.ask("newcomer", adapter=3, at=1.0)
    stage.step(at=5.0)

    assert left(stage) == [leaver]


def test_while_a_slot_is_unused_any_adapter_comes_into_it_though_its_request_cannot_start_yet():
    full = Tenant(name="full", max_running=1)
    stage = Stage(slots=2)
    stage.seat(1, 2, max_new_tokens=1)
    stage.ask("holds", tenant=full, max_new_tokens=400)
    stage.step()
    stage.ask("waits", adapter=1, tenant=full)
    stage.step(at=1.0)
    stage.ask("newcomer", adapter=3, tenant=full)

    assert loads(stage.step(at=2.0)) == [3]
    assert left(stage) == [2]


@pytest.mark.parametrize(("asked_at", "leavers"), [(1.0, [1]), (2.0, []), (3.0, [])])
def test_an_idle_resident_whose_next_request_has_come_leaves_only_for_one_that_came_before_it(asked_at, leavers):
    stage = Stage(slots=1)
    stage.seat(1, max_new_tokens=1)
    stage.ask("next", adapter=1, at=2.0)
    stage.ask("other", adapter=2, at=asked_at)
    plan = stage.step(at=4.0)

    assert left(stage) == leavers
    assert seated(plan) == ([] if leavers else ["next"])


class KeepsForTwo(SlotPolicy):
    """A slot is kept for adapter 2, as behind a drain."""

    reserved = frozenset({AdapterId(2)})


@pytest.mark.parametrize(
    ("slots", "asked", "come"), [(1, (3, 2), [2]), (2, (3, 2), [2, 3]), (2, (3, 4, 2), [2, 3]), (1, (3, 4), [3])]
)
def test_a_slot_is_kept_for_an_adapter_until_it_takes_it_and_the_others_are_free(monkeypatch, slots, asked, come):
    monkeypatch.setitem(SLOT_POLICIES, "keeps", lambda _config, _capacity: KeepsForTwo())
    stage = Stage(adapters=4, slots=slots, policy=PolicyConfig(lora_policy="keeps"))
    for at, number in enumerate(asked):
        stage.ask(f"r{number}", adapter=number, at=0.1 * at)

    assert loads(stage.step(at=1.0)) == come


def test_a_slot_is_kept_for_an_adapter_while_it_is_read(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "keeps", lambda _config, _capacity: KeepsForTwo())
    stage = Stage(adapters=1, slots=1, policy=PolicyConfig(lora_policy="keeps"))
    stage.tell(add_adapter(2))
    stage.ask("cold", adapter=2)
    stage.ask("warm", adapter=1)
    assert loads(stage.step()) == []

    stage.read(2)
    assert loads(stage.step()) == [2]


def test_an_adapter_that_is_kept_a_slot_and_cannot_start_stops_none_behind_it(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "keeps", lambda _config, _capacity: KeepsForTwo())
    stage = Stage(adapters=4, slots=2, policy=PolicyConfig(lora_policy="keeps"), blocks=12)
    stage.seat(1, 3, max_new_tokens=1)
    stage.ask("holds", prompt=100, max_new_tokens=400)
    stage.step()
    for adapter in (1, 2, 3):
        stage.ask(f"waits{adapter}", adapter, at=3.0, prompt=100)
    stage.ask("able", adapter=4, at=2.0)

    assert loads(stage.step(at=4.0)) == [4]


def test_a_resident_that_runs_never_leaves_under_wait():
    stage = Stage(slots=1, policy=WAIT)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    for second in range(300):
        assert len(stage.step(at=float(second)).decodes) == 1

    assert left(stage) == []


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_a_pinned_resident_keeps_its_slot_though_it_is_idle(policy):
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
    stage = Stage(slots=1, policy=ROTATE, blocks=3)
    stage.seat(1)
    stage.ask("no KV for it", adapter=2, prompt=40)
    for second in range(1, 10):
        assert stage.step(at=float(second)).loads == ()


@pytest.mark.parametrize(("prompt", "comes"), [(32, True), (33, False)])
def test_nobody_steps_aside_for_a_prompt_that_would_leave_the_settled_too_little_kv_to_finish(prompt, comes):
    """The settled adapter holds 9 of 20 blocks and may need as many more, so two are left for others."""
    stage = Stage(slots=1, policy=ROTATE, blocks=20)
    stage.seat(1, prompt=130)
    stage.ask("newcomer", adapter=2, prompt=prompt, max_new_tokens=400)

    assert loads(stage.step(at=1.0)) == ([2] if comes else [])


def test_with_a_single_row_adapters_take_turns_at_it():
    stage = Stage(slots=1, policy=ROTATE, rows=1)
    stage.seat(1)
    stage.ask("second", adapter=2)
    assert loads(stage.step(at=1.0)) == [2]
    stage.arrive(2)

    assert seated(stage.step()) == ["second"]


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_leaver_goes_at_once_and_the_rest_run_while_its_slot_is_loaded():
    stage = Stage(slots=2, policy=ROTATE)
    stage.seat(1, 2)
    slot_of = {event.adapter_id: event.slot for event in stage.said(SlotChanged)}
    stage.ask("newcomer", adapter=3, max_new_tokens=400)
    plan = stage.step(at=1.0)
    (leaver,) = left(stage)
    assert [(load.adapter_id, load.slot) for load in plan.loads] == [(3, slot_of[leaver])]
    assert len(plan.decodes) == 1, "the leaver is in no step from now on"
    for _ in range(3):
        assert len(stage.step().decodes) == 1, "no step waits for a copy"

    stage.arrive(3)
    assert seated(stage.step()) == ["newcomer"]


def test_two_copies_are_under_way_at_a_time_and_the_other_residents_run_on():
    stage = Stage(adapters=6, slots=3, policy=ROTATE)
    stage.seat(1, 2, 3)
    for number in (4, 5, 6):
        stage.ask(f"newcomer{number}", adapter=number)
    plan = stage.step(at=1.0)
    assert loads(plan) == [4, 5]
    assert len(plan.decodes) == 1
    assert loads(stage.step()) == []
    stage.arrive(4)
    assert seated(stage.step()) == ["newcomer4"]


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


def test_an_adapter_whose_requests_went_while_it_was_copied_gives_its_slot_back_at_once():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("gone", adapter=2)
    stage.step(at=1.0)
    stage.leave("gone")
    stage.arrive(2)

    assert loads(stage.step()) == [1]
    assert left(stage) == [1, 2]
    stage.arrive(1)
    assert len(stage.step().decodes) == 1


def test_the_slot_of_a_turn_that_fails_goes_back_to_the_adapter_that_left_it():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("unlucky", adapter=2)
    stage.step(at=1.0)
    stage.fail(2)

    assert loads(stage.step()) == [1]
    assert left(stage) == [1, 2]
    stage.arrive(1)
    assert len(stage.step().decodes) == 1


def test_an_adapter_that_is_unloaded_after_its_turn_leaves_for_good():
    stage = Stage(slots=1, policy=ROTATE)
    stage.seat(1)
    stage.ask("newcomer", adapter=2)
    stage.step(at=1.0)
    stage.unload(1, is_forced=True)
    stage.arrive(2)

    assert seated(stage.step()) == ["newcomer"]
    assert left(stage) == [1]


def test_parked_sequences_are_the_first_to_give_up_kv_the_newest_before_the_oldest(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "newest-first", NewestFirst.from_config)  # adapter 1 is parked and stays so
    policy = PolicyConfig(lora_policy="newest-first", lora_rotation_quantum_ms=1000.0)
    stage = Stage(adapters=2, slots=1, policy=policy, blocks=12, rows=6)
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


@pytest.mark.parametrize("policy", [ROTATE, DRAIN, WAIT])
def test_answers_are_the_same_whoever_takes_turns(policy):
    messages = [(0.0, add_adapter(number)) for number in range(1, 5)]
    messages += [
        (float(turn), submit(f"r{turn}", adapter=AdapterId(turn % 5), max_new_tokens=25, arrived_at=float(turn)))
        for turn in range(12)
    ]
    alone = serve(messages, FakeDevice(capacity(slots=4)), policy=WAIT)

    assert outputs(serve(messages, FakeDevice(capacity(slots=1)), policy=policy)) == outputs(alone)
