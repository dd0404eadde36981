"""Adapters that are read later are known at once, and read one at a time behind those that requests ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rota.core.config import LoraConfig
from rota.core.errors import FaultCode
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Finished, FinishReason, HostChanged
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, AdapterFetched
from rota.core.plan import StepPlan
from tests.builders import add_adapter
from tests.scheduler.stage import Stage, loads, seated


def later(adapters: int, held: int = 8, **fields: bool) -> Stage:
    stage = Stage(adapters=0, slots=2, lora=LoraConfig(max_loras_per_batch=2, max_loaded_loras=held))
    for number in range(1, adapters + 1):
        stage.tell(replace(add_adapter(number, **fields), is_read_later=True))
    return stage


def ids(adapters) -> list[int]:
    return [adapter.adapter_id for adapter in adapters]


def read(stage: Stage, adapter: int) -> StepPlan:
    """An adapter lies in host memory; the plan that follows."""
    stage.tell(AdapterFetched(adapter_id=AdapterId(adapter), at=stage.now))
    return stage.step()


def test_all_are_known_before_any_is_read_and_one_is_read_at_a_time():
    stage = later(3)
    plan = stage.step()

    assert [event.adapter_id for event in stage.said(AdapterAdded)] == [1, 2, 3]
    assert (ids(plan.fetches), ids(plan.idle_fetches)) == ([], [1])
    assert stage.step().reads == (), "one read is under way"
    assert ids(read(stage, 1).idle_fetches) == [2]
    assert ids(read(stage, 2).idle_fetches) == [3]
    assert read(stage, 3).reads == ()
    assert len(stage.said(AdapterAdded)) == 0, "each is added once"


def test_only_as_many_are_read_idly_as_host_memory_holds():
    stage = later(5, held=2)
    assert ids(stage.step().idle_fetches) == [1]
    assert ids(read(stage, 1).idle_fetches) == [2]

    plan = read(stage, 2)
    assert (plan.reads, plan.drops) == ((), ()), "nothing leaves for an adapter that nobody asked for"
    stage.ask("asks", adapter=5)
    plan = stage.step()
    assert (ids(plan.fetches), plan.drops) == ([5], (1,))


def test_an_adapter_that_is_asked_for_is_read_at_once_and_many_askers_order_one_read():
    stage = later(4)
    stage.step()
    for number in range(5):
        stage.ask(f"asks{number}", adapter=4)

    plan = stage.step()
    assert (ids(plan.fetches), ids(plan.idle_fetches)) == ([4], [])
    assert stage.step().reads == ()
    plan = read(stage, 4)
    assert loads(plan) == [4], "it does not wait for the idle read of another"
    stage.arrive(4)
    assert seated(stage.step()) == [f"asks{number}" for number in range(5)]


def test_a_request_whose_adapter_is_being_read_idly_waits_for_that_read():
    stage = later(3)
    assert ids(stage.step().idle_fetches) == [1]
    stage.ask("asks", adapter=1)

    assert stage.step().reads == (), "no second read of the same adapter"
    plan = read(stage, 1)
    assert (loads(plan), ids(plan.idle_fetches)) == ([1], [2])


def test_a_request_that_leaves_during_the_read_of_its_adapter_leaves_the_others_undisturbed():
    stage = later(3)
    stage.step()
    stage.ask("leaves", adapter=3)
    assert ids(stage.step().fetches) == [3]
    stage.leave("leaves")
    stage.step()

    assert [event.reason for event in stage.said(Finished)] == [FinishReason.ABORT]
    assert read(stage, 3).reads == (), "the idle read of the first is under way"
    assert ids(read(stage, 1).idle_fetches) == [2]


def test_one_that_turns_out_bad_is_refused_its_requests_fail_and_the_next_is_read():
    stage = later(2)
    stage.step()
    stage.ask("asks", adapter=1)
    stage.fail(1, "It has values that are NaN.")
    plan = stage.step()

    (ending,) = stage.said(Finished)
    assert (ending.fault.code, ending.fault.message) == (FaultCode.ADAPTER_FAILED, "It has values that are NaN.")
    assert [(event.adapter_id, event.reason) for event in stage.said(AdapterRefused)] == [
        (1, "It has values that are NaN.")
    ]
    assert ids(plan.idle_fetches) == [2]
    stage.ask("late", adapter=1)
    stage.step()
    assert stage.said(Finished)[0].fault.code is FaultCode.UNKNOWN_ADAPTER


def test_a_bad_header_is_refused_before_it_is_known():
    stage = Stage(adapters=0, slots=2)
    stage.tell(replace(add_adapter(1), is_read_later=True, refusal="Its rank is too large."))
    assert stage.step().reads == ()

    assert stage.said(AdapterAdded) == []
    assert [event.reason for event in stage.said(AdapterRefused)] == ["Its rank is too large."]


def test_one_that_is_unloaded_before_it_was_read_is_never_read():
    stage = later(3)
    stage.step()
    stage.unload(2)
    stage.step()

    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [2]
    assert ids(read(stage, 1).idle_fetches) == [3]


def test_one_that_is_unloaded_while_it_is_read_leaves_when_the_read_has_ended():
    stage = later(2)
    stage.step()
    stage.unload(1)
    stage.step()
    assert stage.said(AdapterRemoved) == []

    plan = read(stage, 1)
    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [1]
    assert ids(plan.idle_fetches) == [2]


def test_one_that_is_unloaded_and_turns_out_bad_is_only_removed():
    stage = later(1)
    stage.step()
    stage.unload(1)
    stage.fail(1)
    stage.step()

    assert [event.adapter_id for event in stage.said(AdapterRemoved)] == [1]
    assert stage.said(AdapterRefused) == []


def test_a_pinned_one_is_read_first_and_gets_its_slot_without_a_request():
    stage = later(2)
    stage.tell(replace(add_adapter(3, is_pinned=True), is_read_later=True))

    assert ids(stage.step().fetches) == [3]
    assert loads(read(stage, 3)) == [3]


def test_a_pinned_one_that_turns_out_bad_is_read_once():
    stage = later(0)
    stage.tell(replace(add_adapter(1, is_pinned=True), is_read_later=True))
    stage.step()
    stage.fail(1)

    assert stage.step().reads == ()
    assert len(stage.said(AdapterRefused)) == 1


def test_observers_hear_of_idle_reads_as_of_all_others():
    stage = later(1)
    stage.step()
    read(stage, 1)

    assert [(event.adapter_id, event.state.value) for event in stage.said(HostChanged)] == [(1, "reading"), (1, "held")]


def away(stage: Stage, adapter: int, code: FaultCode = FaultCode.SOURCE_AWAY) -> None:
    """The source of an adapter did not answer."""
    stage.tell(AdapterFailed(adapter_id=AdapterId(adapter), at=stage.now, reason="It did not answer.", code=code))


@pytest.mark.parametrize("code", [FaultCode.SOURCE_AWAY, FaultCode.DISK_FULL])
def test_an_adapter_that_may_be_there_the_next_time_stays_known_and_is_read_for_the_next_request(code):
    stage = later(2)
    stage.ask("first", adapter=1)
    assert ids(stage.step().fetches) == [1]
    away(stage, 1, code)
    plan = stage.step()
    assert [end.fault and end.fault.code for end in stage.said(Finished)] == [code]
    assert stage.said(AdapterRefused) == []
    assert ids(plan.reads) == [2], "the other one is read idly, and the source is not asked in vain"
    assert read(stage, 2).reads == ()

    stage.ask("second", adapter=1)
    assert ids(stage.step().fetches) == [1]
    assert 1 in loads(read(stage, 1))
    stage.arrive(1)
    assert "second" in seated(stage.step())


def test_an_adapter_that_is_bad_is_refused_also_if_its_source_was_away_before():
    stage = later(1)
    stage.step()
    away(stage, 1)
    assert stage.step().reads == ()
    stage.ask("asks", adapter=1)
    stage.step()
    stage.fail(1, "Its rank is too large.")
    stage.step()

    assert [event.reason for event in stage.said(AdapterRefused)] == ["Its rank is too large."]
    assert [end.fault and end.fault.code for end in stage.said(Finished)] == [FaultCode.ADAPTER_FAILED]


def test_an_adapter_that_is_added_from_a_source_that_is_away_is_refused_and_may_be_added_again():
    stage = Stage(adapters=0, slots=2)
    stage.tell(add_adapter(1))
    assert ids(stage.step().fetches) == [1]
    stage.ask("waits", adapter=1)
    away(stage, 1)
    stage.step()

    assert [(one.adapter_id, one.code) for one in stage.said(AdapterRefused)] == [(1, FaultCode.SOURCE_AWAY)]
    assert [end.fault and end.fault.code for end in stage.said(Finished)] == [FaultCode.SOURCE_AWAY]
    assert stage.scheduler.is_idle
