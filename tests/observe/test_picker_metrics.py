from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from rota.core.events import AdapterStanding, Inspected, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId, EngineId, Slot
from rota.observe.metrics import Metrics
from rota.observe.snapshot import EngineReport
from tests.builders import capacity
from tests.observe.picker import Pod, picked
from tests.observe.scraped import Scrape, text_of

NAMES = {1: "pirate", 2: "poet", 3: "parrot", 4: "rhyme, or reason", 5: 'quo"te\\'}


def metrics() -> Metrics:
    return Metrics(lambda adapter: NAMES.get(adapter))


def change(metrics: Metrics, slot: int, adapter: int, state: SlotState, engine: int = 0) -> None:
    event = SlotChanged(at=0.0, slot=Slot(slot), adapter_id=AdapterId(adapter), state=state, engine_id=EngineId(engine))
    metrics.observe([event])


def standing(adapter: int = BASE, waiting: int = 0, running: int = 0, parked: int = 0) -> AdapterStanding:
    return AdapterStanding(
        adapter_id=AdapterId(adapter), waiting=waiting, running=running, parked=parked, oldest_at=None, reason=""
    )


def inspected(engine: int = 0, absent: Sequence[int] = (), others: AdapterStanding | None = None) -> Inspected:
    return Inspected(
        at=0.0,
        steps=1,
        rows=1,
        blocks=10,
        blocks_used=4 + engine,
        slots=2,
        adapters=(standing(1, waiting=1, running=2),),
        engine_id=EngineId(engine),
        others=others or standing(),
        absent=tuple(map(AdapterId, absent)),
    )


def text(metrics: Metrics, *answers: Inspected | None) -> str:
    reports = [
        EngineReport(engine_id=EngineId(number), capacity=capacity(blocks=10, slots=2), inspected=one)
        for number, one in enumerate(answers)
    ]
    return text_of(metrics, reports, time.time())


def test_totals_of_all_engines_are_one_sample_each():
    others = standing(waiting=5, running=3, parked=2)
    pod = Pod.read(text(metrics(), inspected(0, others=others), inspected(1)))

    assert (pod.waiting, pod.running) == (1 + 5 + 2 + 1, 2 + 3 + 2)
    assert pod.kv_usage == pytest.approx(9 / 20)
    assert (pod.blocks, pod.block_size) == (20, capacity().block_size)
    assert pod.most_adapters == 4


def test_an_adapter_is_running_once_it_is_ready_in_a_slot_of_any_engine_and_until_it_leaves():
    ours = metrics()

    def pod(absent: Sequence[int] = ()) -> Pod:
        return Pod.read(text(ours, inspected(absent=absent), inspected(1)))

    assert (pod([1]).active, pod([1]).queued) == (set(), {"pirate"})
    change(ours, 0, 1, SlotState.LOADING, engine=1)
    assert (pod().active, pod().queued) == (set(), {"pirate"})
    change(ours, 0, 1, SlotState.READY, engine=1)
    # The first engine wants the adapter too, but requests need not wait for it.
    assert (pod([1]).active, pod([1]).queued) == ({"pirate"}, set())
    change(ours, 0, 1, SlotState.EMPTY, engine=1)
    assert (pod().active, pod().queued) == (set(), set())


def test_the_picker_follows_an_adapter_from_pod_to_pod():
    here, there = metrics(), metrics()

    def prefers(adapter: str, here_absent: Sequence[int] = ()) -> set[str]:
        pods = {
            "here": Pod.read(text(here, inspected(absent=here_absent))),
            "there": Pod.read(text(there, inspected())),
        }
        return picked(pods, adapter)

    assert prefers("pirate") == {"here", "there"}
    change(here, 0, 1, SlotState.READY)
    assert prefers("pirate") == {"here"}
    change(here, 1, 2, SlotState.READY)
    assert prefers("parrot") == {"there"}, "only there is a slot free"
    change(here, 0, 1, SlotState.EMPTY)
    change(here, 0, 3, SlotState.READY)
    assert prefers("pirate", here_absent=[1]) == {"there"}, "its turn here is over"
    change(there, 0, 1, SlotState.READY)
    assert prefers("pirate", here_absent=[1]) == {"there"}


def test_a_name_that_would_read_as_two_is_left_out_and_any_other_is_read_as_given():
    ours = metrics()
    change(ours, 0, 4, SlotState.READY)
    change(ours, 1, 5, SlotState.READY)

    assert Pod.read(text(ours, inspected())).active == {'quo"te\\'}


def test_the_value_beside_adapters_is_when_they_were_listed():
    scrape = Scrape(text(metrics(), inspected()))
    [sample] = scrape.families["vllm:lora_requests_info"].samples

    assert abs(sample.value - time.time()) < 60.0


def test_an_engine_that_does_not_answer_leaves_what_it_holds_to_be_read():
    scrape = Scrape(text(metrics(), None))

    assert "vllm:num_requests_waiting" not in scrape.families
    assert "vllm:lora_requests_info" in scrape.families


def test_without_a_wall_clock_there_are_no_names_of_the_picker():
    plain = text_of(metrics(), [EngineReport(inspected=inspected())])

    assert "vllm:" not in plain
