from __future__ import annotations

from rota.core.errors import Fault, FaultCode
from rota.core.events import AdapterRemoved, AdapterStanding, Finished, FinishReason, Inspected, SlotChanged, SlotState
from rota.observe.meters import IDLE_S
from rota.observe.metrics import Metrics
from tests.observe.scraped import scrape


def make(most: int = 2, name_of=lambda adapter: f"adapter{adapter}") -> Metrics:
    return Metrics(name_of, most_adapters=most)


def ask_and_end(metrics: Metrics, adapter: int, at: float = 0.0) -> None:
    metrics.asked(f"r{adapter}", adapter, at)
    metrics.observe([Finished(request_id=f"r{adapter}", at=at, reason=FinishReason.STOP)])


def counted(metrics: Metrics) -> dict[str, float]:
    """Requests that stopped, by label."""
    samples = [sample for sample in scrape(metrics).samples if sample.name == "rota_requests_total"]
    return {sample.labels["adapter"]: sample.value for sample in samples}


def test_the_first_to_be_asked_for_have_series_of_their_own_and_the_rest_share_one():
    metrics = make(most=2)
    for adapter in (1, 2, 3, 4, 1):
        ask_and_end(metrics, adapter)

    assert counted(metrics) == {"adapter1": 2, "adapter2": 1, "other": 2}


def test_the_base_model_needs_no_place():
    metrics = make(most=0)
    for adapter in (0, 1):
        ask_and_end(metrics, adapter)

    assert counted(metrics) == {"base": 1, "other": 1}


def test_there_is_no_other_until_somebody_is():
    metrics = make(most=1)
    ask_and_end(metrics, 1)

    assert scrape(metrics).adapters("rota_output_tokens_total") == {"base", "adapter1"}


def test_an_adapter_that_was_unloaded_gives_its_place_to_the_next():
    metrics = make(most=2)
    for adapter in (1, 2):
        ask_and_end(metrics, adapter)
    metrics.observe([AdapterRemoved(1, at=1.0)])
    assert counted(metrics) == {"adapter1": 1, "adapter2": 1}  # its last numbers can still be scraped

    ask_and_end(metrics, 3, at=2.0)
    assert counted(metrics) == {"adapter2": 1, "adapter3": 1}


def test_a_busy_adapter_takes_the_place_of_one_long_idle_but_not_of_one_that_rests():
    metrics = make(most=2)
    ask_and_end(metrics, 1, at=0.0)
    ask_and_end(metrics, 2, at=IDLE_S - 1)
    ask_and_end(metrics, 3, at=IDLE_S - 1)
    ask_and_end(metrics, 3, at=IDLE_S + 1)
    ask_and_end(metrics, 4, at=IDLE_S + 1)

    assert counted(metrics) == {"adapter2": 1, "adapter3": 1, "other": 2}


def test_an_adapter_with_an_open_request_keeps_its_place_however_long_that_takes():
    metrics = make(most=1)
    metrics.asked("long", 1, 0.0)
    ask_and_end(metrics, 2, at=10 * IDLE_S)
    metrics.observe([Finished(request_id="long", at=10 * IDLE_S, reason=FinishReason.STOP)])

    assert counted(metrics) == {"adapter1": 1, "other": 1}


def test_a_name_that_is_loaded_again_goes_on_in_its_old_series():
    names = {1: "pirate", 2: "pirate"}
    metrics = make(name_of=names.get)
    ask_and_end(metrics, 1)
    metrics.observe([AdapterRemoved(1, at=1.0)])
    ask_and_end(metrics, 2, at=2.0)

    assert counted(metrics) == {"pirate": 2}


def test_adapters_that_come_and_go_for_weeks_leave_nothing_behind():
    metrics = make(most=3)
    sizes = set()
    for adapter in range(1, 2001):
        at = adapter * 60.0
        ask_and_end(metrics, adapter, at)
        metrics.observe([SlotChanged(at=at, slot=adapter % 2, adapter_id=adapter, state=SlotState.READY)])
        metrics.observe(
            [
                SlotChanged(at=at, slot=adapter % 2, adapter_id=adapter, state=SlotState.EMPTY),
                AdapterRemoved(adapter, at),
            ]
        )
        if adapter % 100 == 0:
            sizes.add(len(scrape(metrics).samples))

    assert len(sizes) == 1
    assert len(metrics._labels) == 1  # the base model's


def test_a_request_that_came_just_after_its_adapter_went_leaves_nothing_behind():
    metrics = make()
    metrics.observe([AdapterRemoved(7, at=1.0)])
    metrics.asked("late", 7, 1.0)
    metrics.observe(
        [
            Finished(
                request_id="late", at=1.0, reason=FinishReason.FAILED, fault=Fault(FaultCode.UNKNOWN_ADAPTER, "Gone.")
            )
        ]
    )

    assert 7 not in metrics._labels


def test_waiting_requests_of_adapters_without_a_place_add_up():
    metrics = make(most=1)
    for adapter in (1, 2, 3):
        metrics.asked(f"r{adapter}", adapter, 0.0)
    standings = tuple(
        AdapterStanding(adapter_id=adapter, waiting=adapter, running=0, parked=0, oldest_at=1.0, reason="why")
        for adapter in (1, 2, 3)
    )
    read = scrape(metrics, Inspected(at=2.0, steps=1, rows=0, blocks=8, blocks_used=0, slots=2, adapters=standings))

    assert read("rota_requests_waiting", adapter="adapter1") == 1
    assert read("rota_requests_waiting", adapter="other") == 5
    assert read("rota_oldest_wait_seconds", adapter="other") == 1.0
