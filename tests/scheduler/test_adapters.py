from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.config import LoraConfig
from rota.core.errors import Fault, FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Finished,
    FinishReason,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, RemoveAdapter
from rota.core.policy_config import PolicyConfig
from tests.builders import add_adapter
from tests.scheduler.stage import Stage, loads, seated


def fetches(plan) -> list[int]:
    return [adapter.adapter_id for adapter in plan.fetches]


# ── becoming known ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_is_added_when_it_has_been_read():
    stage = Stage(adapters=0)
    stage.tell(add_adapter(1))
    assert fetches(stage.step()) == [1]
    assert stage.said(AdapterAdded) == []

    stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.5))
    stage.step()
    assert stage.said(AdapterAdded) == [AdapterAdded(AdapterId(1), 0.5)]


def test_one_that_cannot_be_read_is_refused_with_the_reason_and_is_not_known():
    stage = Stage(adapters=0)
    stage.tell(add_adapter(1))
    stage.step()
    stage.fail(1, "adapters/1 has rank 900")
    stage.ask("late", adapter=1)
    stage.step()

    assert [event.reason for event in stage.said(AdapterRefused)] == ["adapters/1 has rank 900"]
    assert [event.fault.code for event in stage.said(Finished)] == [FaultCode.UNKNOWN_ADAPTER]


def test_who_asks_for_an_adapter_while_it_is_read_waits_for_it():
    stage = Stage(adapters=0)
    stage.tell(add_adapter(1))
    stage.ask("early", adapter=1)
    stage.step()
    assert stage.why("early") == "its adapter is not in a slot"

    stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.0))
    assert loads(stage.step()) == [1]


def test_who_asked_for_an_adapter_that_cannot_be_read_is_told_why():
    stage = Stage(adapters=0)
    stage.tell(add_adapter(1))
    stage.ask("early", adapter=1)
    stage.step()
    stage.fail(1, "no such folder")
    stage.step()

    (end,) = stage.said(Finished)
    assert (end.reason, end.fault.code, end.fault.message) == (
        FinishReason.FAILED,
        FaultCode.ADAPTER_FAILED,
        "no such folder",
    )
    assert stage.scheduler.is_idle


def test_an_adapter_that_found_no_room_on_its_way_is_refused_for_that():
    stage = Stage(adapters=0)
    stage.tell(replace(add_adapter(1), refusal="There is no room.", refusal_code=FaultCode.DISK_FULL))
    stage.step()

    (refused,) = stage.said(AdapterRefused)
    assert (refused.adapter_id, refused.reason, refused.code) == (1, "There is no room.", FaultCode.DISK_FULL)
    assert stage.scheduler.is_idle


def test_an_id_is_used_once():
    stage = Stage(adapters=1)
    stage.tell(add_adapter(1))
    stage.step()
    assert "already known" in stage.said(AdapterRefused)[0].reason


def test_without_slots_no_adapter_is_added():
    stage = Stage(adapters=0, slots=0)
    stage.tell(add_adapter(1))
    stage.step()
    assert "without adapter slots" in stage.said(AdapterRefused)[0].reason


@pytest.mark.parametrize(("slots", "granted"), [(1, 0), (2, 1), (3, 2)])
def test_one_slot_is_never_pinned(slots, granted):
    stage = Stage(adapters=slots, slots=slots, pinned=tuple(range(1, slots + 1)))
    stage.step()

    assert len(stage.said(AdapterAdded)) == granted
    (refused,) = stage.said(AdapterRefused)
    assert f"of {slots} slots at most {granted} may be pinned" in refused.reason


def test_no_more_adapters_are_read_at_a_time_than_host_memory_holds():
    stage = Stage(adapters=0, lora=LoraConfig(max_loaded_loras=2))
    for number in (1, 2, 3):
        stage.tell(add_adapter(number))
    assert fetches(stage.step()) == [1, 2]

    stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.0))
    plan = stage.step()
    assert fetches(plan) == [3]
    assert plan.drops == (1,)


def test_an_adapter_dropped_for_room_comes_back_from_its_path_when_somebody_asks():
    stage = Stage(adapters=0, lora=LoraConfig(max_loaded_loras=1))
    for number in (1, 2):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    stage.ask("r", adapter=1)
    assert fetches(stage.step()) == [1]

    stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.0))
    assert loads(stage.step()) == [1]
    assert len(stage.said(AdapterAdded)) == 2, "it was never gone"


def test_host_memory_goes_to_one_that_could_run_before_one_that_could_not_however_long_it_waits():
    """Adapter 1 is parked and holds KV that adapters 2 and 3 wait for: were it kept out, nothing could run."""
    policy = PolicyConfig(lora_policy="rotate")
    stage = Stage(adapters=0, slots=1, blocks=4, policy=policy, lora=LoraConfig(max_loaded_loras=1))
    for number in (3, 2, 1):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    stage.seat(1, max_new_tokens=20)
    stage.ask("second", adapter=2)
    stage.step(at=1.0)
    stage.tell(AdapterFetched(adapter_id=AdapterId(2), at=1.0))
    assert loads(stage.step()) == [2]
    stage.ask("takes the last blocks", prompt=28, max_new_tokens=400)
    stage.step()
    stage.arrive(2)
    stage.ask("third", adapter=3, at=-5.0)

    plan = stage.step()
    assert (plan.drops, fetches(plan)) == ((2,), [1])


# ── loading beside the steps ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_pending_load_is_not_used_before_it_is_complete():
    stage = Stage()
    stage.ask("waits", adapter=1)
    assert loads(stage.step()) == [1]
    for _ in range(3):
        plan = stage.step()
        assert not plan.has_work
        assert stage.why("waits") == "its adapter is not in a slot"

    stage.arrive(1)
    assert seated(stage.step()) == ["waits"]


def test_a_loaded_adapter_is_used_again_without_loading_again():
    stage = Stage()
    stage.seat(1, max_new_tokens=1)
    stage.ask("again", adapter=1)
    plan = stage.step()

    assert seated(plan) == ["again"]
    assert plan.loads == ()


def test_a_load_that_nobody_wants_any_more_is_reaped_and_makes_room_at_once():
    stage = Stage(slots=1)
    stage.ask("gone", adapter=1)
    stage.step()
    stage.leave("gone")
    stage.ask("next", adapter=2)
    assert stage.step().loads == (), "its slot is not free before the copy is complete"

    stage.arrive(1)
    assert loads(stage.step()) == [2]


def test_a_finished_load_is_seen_before_anyone_asks_for_room():
    """Both come between two passes: in the next one the stale adapter makes room already."""
    stage = Stage(slots=1)
    stage.ask("gone", adapter=1)
    stage.step()
    stage.ask("next", adapter=2)
    stage.arrive(1)
    stage.leave("gone")

    assert loads(stage.step()) == [2]


def test_one_that_was_loaded_for_nobody_is_an_ordinary_resident():
    stage = Stage(slots=2)
    stage.ask("gone", adapter=1)
    stage.step()
    stage.leave("gone")
    stage.arrive(1)
    stage.step()

    stage.ask("back", adapter=1)
    plan = stage.step()
    assert seated(plan) == ["back"]
    assert plan.loads == ()


def test_base_requests_run_while_an_adapter_loads():
    stage = Stage()
    stage.ask("adapted", adapter=1)
    stage.ask("plain")
    plan = stage.step()

    assert loads(plan) == [1]
    assert seated(plan) == ["plain"]


@pytest.mark.parametrize("policy", ["wait", "rotate"])
def test_a_just_loaded_adapter_is_not_evicted_before_it_has_run_while_somebody_waits_for_it(policy):
    stage = Stage(slots=1, policy=PolicyConfig(lora_policy=policy))
    stage.ask("later", adapter=1, at=5.0)
    stage.step()
    stage.ask("earlier", adapter=2, at=1.0)
    stage.arrive(1)

    plan = stage.step(at=10.0)
    assert seated(plan) == ["later"]
    assert plan.loads == ()


def test_without_overlap_the_step_that_loads_an_adapter_runs_it():
    stage = Stage(lora=LoraConfig(enable_lora_overlap_loading=False))
    stage.ask("r", adapter=1)
    plan = stage.step()

    assert [load.is_awaited for load in plan.loads] == [True]
    assert seated(plan) == ["r"]
    assert len(plan.chunks) == 1


def test_without_overlap_a_host_copy_outlives_the_step_that_copies_from_it():
    """Both want a slot and host memory holds one of them: it is not dropped for the other in the same step."""
    stage = Stage(adapters=0, lora=LoraConfig(max_loaded_loras=1, enable_lora_overlap_loading=False))
    for number in (1, 2):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
        stage.ask(f"r{number}", adapter=number)
    plan = stage.step()
    assert (loads(plan), plan.drops, fetches(plan)) == ([2], (), [])

    plan = stage.step()
    assert (plan.drops, fetches(plan)) == ((2,), [1])


def test_adapters_whose_requests_cannot_start_yet_are_fetched_ahead_into_empty_slots_only():
    stage = Stage(slots=2, rows=1)
    stage.seat(1)
    for adapter in (2, 3):
        stage.ask(f"waits{adapter}", adapter=adapter)
    assert loads(stage.step()) == [2], "one slot was empty, and nobody leaves for a request that has no row"

    stage.arrive(2)
    assert stage.step().loads == ()


# ── failing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_load_ends_its_waiters_and_frees_the_slot_and_the_rest_does_not_notice():
    stage = Stage(slots=2)
    stage.seat(2)
    stage.ask("waits", adapter=1)
    stage.step()
    stage.fail(1, "the copy went wrong")
    stage.ask("other", adapter=3)
    plan = stage.step()

    assert loads(plan) == [3]
    assert len(plan.decodes) == 1
    (end,) = stage.said(Finished)
    assert (end.request_id, end.fault.code) == ("waits", FaultCode.ADAPTER_FAILED)
    change = stage.said(SlotChanged)[-2]
    assert (change.reason, change.detail) == (SlotReason.FAILED, "the copy went wrong")


def test_an_adapter_that_failed_is_read_again_for_the_next_who_asks():
    stage = Stage()
    stage.ask("unlucky", adapter=1)
    stage.step()
    stage.fail(1)
    stage.ask("lucky", adapter=1)
    assert fetches(stage.step()) == [1]

    stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.0))
    assert loads(stage.step()) == [1]


def test_a_pinned_adapter_that_fails_is_not_read_over_and_over():
    stage = Stage(adapters=1, pinned=(1,))
    assert loads(stage.step()) == [1]
    stage.fail(1)
    plan = stage.step()
    assert (plan.fetches, plan.loads, plan.drops) == ((), (), (1,))
    assert not stage.step().has_work

    stage.ask("tries", adapter=1)
    assert fetches(stage.step()) == [1]


# ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def removed(stage: Stage) -> list[int]:
    return [event.adapter_id for event in stage.said(AdapterRemoved)]


def test_an_idle_adapter_leaves_at_once_with_its_slot_and_its_host_copy():
    stage = Stage()
    stage.seat(1, max_new_tokens=1)
    stage.unload(1)
    plan = stage.step()

    assert plan.drops == (1,)
    assert removed(stage) == [1]
    assert stage.said(SlotChanged)[-1].state is SlotState.EMPTY


def test_unloading_waits_for_users_and_takes_no_new_ones():
    stage = Stage()
    stage.seat(1, max_new_tokens=3)
    stage.unload(1)
    stage.ask("late", adapter=1)
    stage.step()
    assert [end.fault.code for end in stage.said(Finished)] == [FaultCode.UNKNOWN_ADAPTER]
    assert removed(stage) == []

    while not stage.scheduler.is_idle:
        stage.step()
    stage.step()
    assert [end.reason for end in stage.said(Finished)] == [FinishReason.LENGTH]
    assert removed(stage) == [1]


def test_an_old_version_takes_new_requests_until_it_has_no_user():
    stage = Stage()
    stage.seat(1, max_new_tokens=3)
    stage.tell(RemoveAdapter(adapter_id=AdapterId(1), at=stage.now, takes_requests=True))
    stage.ask("late", adapter=1, max_new_tokens=9)
    while not stage.scheduler.is_idle:
        assert removed(stage) == []
        stage.step()
    stage.ask("too late", adapter=1)
    stage.step()

    assert removed(stage) == [1]
    assert [(end.request_id, end.fault and end.fault.code) for end in stage.said(Finished)] == [
        ("runs1", None),
        ("late", None),
        ("too late", FaultCode.UNKNOWN_ADAPTER),
    ]


@pytest.mark.parametrize("fault", [None, Fault(FaultCode.ENGINE_DIED, "Another replica died.", "model")])
def test_unloading_by_force_ends_users_at_once(fault):
    stage = Stage()
    stage.seat(1)
    stage.ask("waits", adapter=1, prompt=500)
    stage.tell(RemoveAdapter(adapter_id=AdapterId(1), at=stage.now, is_forced=True, fault=fault))
    stage.step()

    unloaded = Fault(FaultCode.ADAPTER_FAILED, "Adapter 'adapter1' was unloaded.", "model")
    assert {end.request_id: end.fault for end in stage.said(Finished)} == dict.fromkeys(
        ("runs1", "waits"), fault or unloaded
    )
    assert removed(stage) == [1]
    assert stage.scheduler.is_idle


@pytest.mark.parametrize("is_forced", [False, True])
def test_unloading_waits_for_a_copy_under_way_and_then_frees_the_slot(is_forced):
    stage = Stage(slots=1)
    stage.ask("r", adapter=1)
    stage.step()
    stage.leave("r")
    stage.unload(1, is_forced)
    stage.ask("next", adapter=2)
    assert stage.step().loads == ()
    assert removed(stage) == []

    stage.arrive(1)
    assert loads(stage.step()) == [2]
    assert removed(stage) == [1]


def test_unloading_while_a_copy_fails_still_ends():
    stage = Stage(slots=1)
    stage.ask("r", adapter=1)
    stage.step()
    stage.unload(1)
    stage.fail(1)
    stage.step()

    assert removed(stage) == [1]
    assert stage.scheduler.is_idle


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_unloading_what_is_still_being_read_answers_both_who_added_and_who_removed_it(is_read, is_ordered):
    stage = Stage(adapters=0)
    stage.tell(add_adapter(1))
    if is_ordered:
        stage.step()
    stage.unload(1)
    stage.ask("late", adapter=1)
    stage.step()
    assert [end.fault.code for end in stage.said(Finished)] == [FaultCode.UNKNOWN_ADAPTER]
    if is_read:
        stage.tell(AdapterFetched(adapter_id=AdapterId(1), at=0.0))
    else:
        stage.fail(1)
    stage.step()

    assert len(stage.said(AdapterAdded if is_read else AdapterRefused)) == 1
    assert removed(stage) == [1]


def test_unloading_a_pinned_adapter_that_never_got_its_slot_leaves_nothing_behind():
    stage = Stage(adapters=2, slots=2)
    stage.seat(1, 2)
    stage.tell(add_adapter(3, is_pinned=True))
    stage.step()
    stage.tell(AdapterFetched(adapter_id=AdapterId(3), at=0.0))
    stage.step()
    stage.unload(3)
    stage.step()

    assert removed(stage) == [3]
    assert stage.step().loads == ()


def test_unloading_one_that_is_unknown_is_refused_with_a_sentence():
    stage = Stage(adapters=0)
    stage.unload(7)
    stage.step()
    assert stage.said(AdapterRefused)[0].reason == "No adapter with the id 7 is known."


def test_unload_is_final_and_a_reload_under_a_new_id_is_another_adapter():
    stage = Stage(adapters=1)
    stage.seat(1, max_new_tokens=1, prompt=tuple(range(40)))
    stage.unload(1)
    stage.ask("old", adapter=1)
    stage.tell(add_adapter(2))
    stage.step()
    assert [end.fault.code for end in stage.said(Finished) if end.fault] == [FaultCode.UNKNOWN_ADAPTER]

    stage.tell(AdapterFetched(adapter_id=AdapterId(2), at=0.0))
    stage.ask("new", adapter=2, max_new_tokens=1, prompt=tuple(range(40)))
    stage.step()
    stage.arrive(2)
    stage.step()
    assert [end.cached_tokens for end in stage.said(Finished)] == [0], "old KV is never taken for new"
