"""What the first read of a version has found goes along with every later read of it."""

from __future__ import annotations

from rota.core.config import LoraConfig
from rota.core.errors import FaultCode
from rota.core.events import AdapterRefused, AdapterRemoved, Finished, HostChanged
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, AdapterFetched, SealAdapter
from tests.builders import add_adapter
from tests.scheduler.stage import Stage

ONE, FIRST, OTHER = AdapterId(1), ("first",), ("other",)
CHANGED = "'adapter1' changed since version 1 was loaded; PUT it again."


def fetched(stage: Stage, number: int, seals: tuple[str, ...] = FIRST) -> None:
    stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0, seals=seals))


def on_disk() -> Stage:
    """Host memory holds one adapter; the first one was there, and has left."""
    stage = Stage(adapters=0, slots=1, lora=LoraConfig(max_loras_per_batch=1, max_loaded_loras=1))
    for number in (1, 2):
        stage.tell(add_adapter(number))
        stage.step()
        fetched(stage, number)
    return stage


def test_a_version_that_left_host_memory_is_read_again_with_its_seals():
    stage = on_disk()
    stage.ask("again", adapter=1)

    assert [adapter.seals for adapter in stage.step().fetches] == [FIRST]
    assert [event.seals for event in stage.said(HostChanged) if event.seals] == [FIRST, FIRST]


def test_a_version_that_changed_is_lost_and_its_requests_are_told_why():
    stage = on_disk()
    stage.ask("again", adapter=1)
    stage.step()
    stage.tell(AdapterFailed(adapter_id=ONE, at=0.0, reason=CHANGED, code=FaultCode.ADAPTER_CHANGED))
    stage.ask("late", adapter=1)
    stage.step()

    assert [(one.adapter_id, one.code) for one in stage.said(AdapterRefused)] == [(1, FaultCode.ADAPTER_CHANGED)]
    again, late = stage.said(Finished)
    assert (again.fault.code, again.fault.message) == (FaultCode.ADAPTER_CHANGED, CHANGED)
    assert late.fault.code is FaultCode.UNKNOWN_ADAPTER


def test_what_another_engine_has_read_first_is_asked_of_the_read_here():
    stage = on_disk()
    stage.tell(SealAdapter(AdapterId(3), 0.0, OTHER))  # of an adapter that is not known here
    stage.tell(add_adapter(3))
    stage.tell(SealAdapter(AdapterId(3), 0.0, FIRST))

    assert [adapter.seals for adapter in stage.step().fetches] == [FIRST]


def test_a_read_that_was_under_way_when_another_engine_was_first_must_have_found_the_same():
    stage = on_disk()
    for number, seals in ((3, FIRST), (4, OTHER)):
        stage.tell(add_adapter(number))
        stage.step()
        stage.tell(SealAdapter(AdapterId(number), 0.0, FIRST))
        fetched(stage, number, seals)
    stage.step()

    assert [one.adapter_id for one in stage.said(AdapterRefused)] == [4]


def test_an_engine_that_has_read_something_else_gives_it_up():
    stage = on_disk()
    stage.ask("under way", adapter=2)
    stage.tell(SealAdapter(AdapterId(2), 0.0, FIRST))
    stage.step()
    stage.arrive(2)
    assert stage.said(AdapterRemoved) == []

    stage.tell(SealAdapter(AdapterId(2), 0.0, OTHER))
    stage.step()
    assert [one.adapter_id for one in stage.said(AdapterRemoved)] == [2]
    assert stage.said(Finished)[0].fault.code is FaultCode.ADAPTER_CHANGED
