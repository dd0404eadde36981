"""What happens in an engine becomes metrics of it, of its adapters and of its keys."""

from __future__ import annotations

import math
import os

import pytest

from rota.core.errors import Fault, FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRemoved,
    AdapterStanding,
    Admitted,
    DrainChanged,
    DrainState,
    EngineRestarted,
    Finished,
    FinishReason,
    Inspected,
    Preempted,
    PrefillsReleased,
    Produced,
    Routed,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import BASE, EngineId
from rota.core.standstill import StoodStill
from rota.observe.meters import IDLE_S, count
from rota.observe.metric_table import METRICS
from rota.observe.metrics import Metrics
from tests.counting import calls_in
from tests.observe.scraped import scrape


def make(**given) -> Metrics:
    return Metrics(lambda adapter: f"adapter{adapter}", **given)


def one_request(
    metrics: Metrics, id: str = "a", adapter: int = BASE, at: float = 10.0, key: str = "", **ending
) -> None:
    """Asked, admitted a quarter of a second later, a token after half a second, two more a tenth apart, ended."""
    metrics.asked(id, adapter, at)
    metrics.owned([id], key or "anyone", "call", key)
    metrics.observe([Admitted(request_id=id, at=at + 0.25, cached_tokens=16)])
    for step in range(3):
        metrics.observe(
            [
                Produced(
                    at=at + 0.5 + step / 10,
                    request_ids=(id,),
                    tokens=(7,),
                    step_s=0.02,
                    prompt_tokens=40 if step == 0 else 0,
                )
            ]
        )
    metrics.observe([finished(id, at + 0.75, **ending)])


def finished(id: str, at: float = 1.0, reason: FinishReason = FinishReason.LENGTH, **fields) -> Finished:
    return Finished(
        request_id=id, at=at, reason=reason, **{"prompt_tokens": 40, "output_tokens": 3, "cached_tokens": 16, **fields}
    )


def inspected(*standings: AdapterStanding, at: float = 20.0) -> Inspected:
    return Inspected(at=at, steps=9, rows=2, blocks=64, blocks_used=5, slots=2, adapters=standings)


def test_a_request_leaves_its_times_and_tokens_behind():
    metrics = make()
    one_request(metrics)
    read = scrape(metrics)

    assert read("rota_requests_total", adapter="base", outcome="length") == 1
    assert read("rota_queue_wait_seconds_sum", adapter="base") == pytest.approx(0.25)
    assert read("rota_ttft_seconds_sum", adapter="base") == pytest.approx(0.5)
    assert read("rota_ttft_seconds_bucket", adapter="base", le="0.5") == 1
    assert read("rota_ttft_seconds_bucket", adapter="base", le="0.25") == 0
    assert read("rota_token_gap_seconds_count", adapter="base") == 2
    assert read("rota_token_gap_seconds_sum", adapter="base") == pytest.approx(0.2)
    assert read("rota_e2e_seconds_sum", adapter="base") == pytest.approx(0.75)
    assert read("rota_prompt_tokens_total", adapter="base") == 40
    assert read("rota_cached_tokens_total", adapter="base") == 16
    assert read("rota_output_tokens_total", adapter="base") == 3
    assert read("rota_computed_prompt_tokens_total", engine="0") == 40
    assert read("rota_step_seconds_count", engine="0") == 3


def test_an_answer_leaves_behind_how_long_its_reader_stood_without_text():
    """At 20 tokens a second three tokens are text for 0.15 s; the fourth comes 0.65 s behind the first."""
    for pace, answers, sum_s in ((20.0, 1, 0.5), (0.0, 0, 0.0)):
        metrics = make(reader_pace=pace)
        metrics.asked("r", BASE, 0.0)
        for at in (1.0, 1.01, 1.02, 1.65, 1.7):
            metrics.observe([Produced(at=at, request_ids=("r",), tokens=(7,))])
        metrics.asked("embedding", BASE, 0.0)
        metrics.observe([finished("r", 1.7), finished("embedding", 1.7)])
        read = scrape(metrics)
        assert read("rota_visible_stall_seconds_count", adapter="base") == answers, "an embedding has no reader"
        assert read("rota_visible_stall_seconds_sum", adapter="base") == pytest.approx(sum_s)


def test_a_value_on_a_bound_is_in_the_bucket_of_that_bound_and_an_endless_one_in_the_last():
    metrics = make()
    for waited_s in (2.5, 2.6, math.inf):
        metrics.observe([PrefillsReleased(at=1.0, reason="wait_success", passes=1, waited_s=waited_s)])
    read = scrape(metrics)

    below = [read("rota_prefill_delayer_wait_seconds_bucket", engine="0", le=le) for le in ("2.5", "5.0", "+Inf")]
    assert below == [1, 2, 3]


def test_a_refused_request_counts_by_its_fault_and_has_no_times():
    metrics = make()
    metrics.asked("a", BASE, 1.0)
    metrics.observe([finished("a", reason=FinishReason.FAILED, fault=Fault(FaultCode.QUEUE_FULL, "Full."))])
    read = scrape(metrics)

    assert read("rota_requests_total", adapter="base", outcome="queue_full") == 1
    assert read("rota_prompt_tokens_total", adapter="base") == 0
    assert read("rota_e2e_seconds_count", adapter="base") == 0


def test_a_preempted_request_waits_in_the_queue_once():
    metrics = make()
    metrics.asked("a", BASE, 1.0)
    metrics.observe(
        [
            Admitted(request_id="a", at=2.0, cached_tokens=0),
            Preempted("a", 3.0),
            Admitted(request_id="a", at=9.0, cached_tokens=0),
        ]
    )
    read = scrape(metrics)

    assert read("rota_preemptions_total", adapter="base") == 1
    assert read("rota_queue_wait_seconds_count", adapter="base") == 1
    assert read("rota_queue_wait_seconds_sum", adapter="base") == 1.0


def test_slots_loads_evictions_and_turns_are_counted():
    metrics = make()
    metrics.observe(
        [
            SlotChanged(at=1.0, slot=0, adapter_id=1, state=SlotState.LOADING, reason=SlotReason.SLOT_EMPTY),
            SlotChanged(at=1.5, slot=0, adapter_id=1, state=SlotState.READY),
            SlotChanged(at=2.0, slot=1, adapter_id=2, state=SlotState.LOADING, reason=SlotReason.TURN_COME),
            SlotChanged(at=2.25, slot=1, adapter_id=2, state=SlotState.READY),
            SlotChanged(at=2.25, slot=0, adapter_id=1, state=SlotState.EMPTY, reason=SlotReason.TURN_OVER),
            SlotChanged(at=3.0, slot=0, adapter_id=3, state=SlotState.LOADING, reason=SlotReason.SLOT_EMPTY),
        ]
    )
    read = scrape(metrics, inspected())

    assert [read(f"rota_slots{what}", engine="0") for what in ("", "_used", "_loading")] == [2, 1, 1]
    assert read("rota_rotations_total", engine="0") == 1
    assert read("rota_adapter_load_seconds_sum", engine="0") == pytest.approx(0.75)


def test_loads_and_evictions_belong_to_their_adapter():
    metrics = make()
    one_request(metrics, adapter=1)
    metrics.observe(
        [
            SlotChanged(at=1.0, slot=0, adapter_id=1, state=SlotState.LOADING),
            SlotChanged(at=2.0, slot=0, adapter_id=1, state=SlotState.EMPTY, reason=SlotReason.IDLE),
        ]
    )
    read = scrape(metrics)

    assert read("rota_adapter_loads_total", adapter="adapter1") == 1
    assert read("rota_adapter_evictions_total", adapter="adapter1") == 1
    assert read("rota_adapter_loads_total", adapter="base") == 0


def test_drains_and_delays_count_by_what_became_of_them():
    metrics = make()
    metrics.observe(
        [
            DrainChanged(at=1.0, victim=1, beneficiary=2, state=DrainState.STARTED),
            DrainChanged(at=2.0, victim=1, beneficiary=2, state=DrainState.FINISHED),
            DrainChanged(at=3.0, victim=1, beneficiary=2, state=DrainState.STARTED),
            PrefillsReleased(at=1.0, reason="no_wait", passes=0, waited_s=0.0),
            PrefillsReleased(at=2.0, reason="wait_timeout", passes=5, waited_s=0.05),
        ]
    )
    read = scrape(metrics)

    assert read("rota_drains_total", engine="0", state="started") == 2
    assert read("rota_drains_total", engine="0", state="finished") == 1
    assert read("rota_prefill_delayer_outcomes_total", engine="0", reason="no_wait") == 1
    assert read("rota_prefill_delayer_outcomes_total", engine="0", reason="wait_timeout") == 1
    assert read("rota_prefill_delayer_wait_passes_bucket", engine="0", le="2.0") == 0
    assert read("rota_prefill_delayer_wait_passes_bucket", engine="0", le="5.0") == 1
    assert read("rota_prefill_delayer_wait_seconds_count", engine="0") == 1


def test_gauges_are_what_the_engine_answered_and_zero_for_those_it_does_not_mention():
    metrics = make()
    one_request(metrics, adapter=1)
    one_request(metrics, adapter=2)
    read = scrape(
        metrics,
        inspected(
            AdapterStanding(adapter_id=BASE, waiting=0, running=2, parked=0, oldest_at=None, reason=""),
            AdapterStanding(adapter_id=2, waiting=3, running=0, parked=1, oldest_at=18.5, reason="why"),
        ),
    )

    assert read("rota_requests_running", adapter="base") == 2
    assert read("rota_requests_waiting", adapter="adapter2") == 3
    assert read("rota_requests_parked", adapter="adapter2") == 1
    assert read("rota_oldest_wait_seconds", adapter="adapter2") == 1.5
    assert read("rota_requests_waiting", adapter="adapter1") == 0
    assert (read("rota_kv_blocks", engine="0"), read("rota_kv_blocks_used", engine="0")) == (64, 5)


def test_without_an_answer_counters_stay_and_what_only_the_engine_knows_is_missing():
    metrics = make()
    one_request(metrics)
    read = scrape(metrics, inspected=None, is_up=False)

    assert read("rota_engine_up", engine="0") == 0
    assert read("rota_output_tokens_total", adapter="base") == 3
    assert read("rota_kv_blocks_used", engine="0") is None
    assert read("rota_requests_waiting", adapter="base") is None


def test_a_new_engine_begins_with_empty_slots():
    metrics = make()
    metrics.observe(
        [
            SlotChanged(at=1.0, slot=0, adapter_id=1, state=SlotState.READY),
            EngineRestarted(at=2.0, reason="It was killed."),
        ]
    )
    read = scrape(metrics, inspected())

    assert read("rota_slots_used", engine="0") == 0
    assert read("rota_engine_restarts_total", engine="0") == 1


def test_a_standstill_counts_once_however_often_it_is_told():
    metrics = make()
    waits, lasts = (StoodStill(at=9.0, since=0.0, requests=1, waits_for="a read", is_news=one) for one in (True, False))
    metrics.observe([waits, lasts, StoodStill(at=40.0, since=0.0, requests=1)])
    read = scrape(metrics)

    assert [read("rota_standstills_total", engine="0", kind=kind) for kind in ("waiting", "stuck")] == [1, 1]


def test_adapters_are_loaded_until_they_are_removed():
    metrics = make()
    metrics.observe([AdapterAdded(1, 1.0), AdapterAdded(2, 1.0), AdapterRemoved(1, 2.0)])

    assert scrape(metrics)("rota_adapters_loaded") == 1


def test_two_engines_are_counted_apart_and_a_restart_empties_the_slots_of_one():
    metrics = make()
    for engine in map(EngineId, (0, 1)):
        metrics.observe(
            [Produced(at=1.0, request_ids=(), tokens=(), step_s=0.5, prompt_tokens=8 + engine, engine_id=engine)]
        )
        metrics.observe([SlotChanged(at=1.0, slot=0, adapter_id=1, state=SlotState.READY, engine_id=engine)])
    metrics.observe([DrainChanged(at=1.0, victim=1, beneficiary=2, state=DrainState.STARTED, engine_id=EngineId(1))])
    metrics.observe([EngineRestarted(at=2.0, reason="It was killed.", engine_id=EngineId(1))])
    read = scrape(metrics, inspected())

    assert [read("rota_computed_prompt_tokens_total", engine=engine) for engine in "01"] == [8, 9]
    assert [read("rota_engine_restarts_total", engine=engine) for engine in "01"] == [0, 1]
    assert [read("rota_drains_total", engine=engine, state="started") for engine in "01"] == [None, 1]
    assert read("rota_slots_used", engine="0") == 1
    assert [*metrics.slots] == [(0, 0)]


def test_nothing_is_kept_of_requests_that_ended():
    metrics = make()
    for number in range(100):
        one_request(metrics, f"r{number}", adapter=number % 3)

    assert metrics.journeys == {}


def test_a_whole_scrape_has_exactly_the_names_kinds_and_labels_of_the_table():
    metrics = make()
    one_request(metrics, adapter=1, key="acme")
    metrics.limit_met("acme", "tokens_per_minute", 1.0)
    metrics.asked("r1", 1, 1.0)
    metrics.routed(["r1"], "legal", "legal@2")
    metrics.observe([finished("r1")])
    metrics.traffic.weigh("legal", {"legal@2": 1.0})
    count(metrics.traffic.rollbacks, "unloaded")
    count(metrics.traffic.shadows, "dropped")
    metrics.observe(
        [
            DrainChanged(at=1.0, victim=1, beneficiary=2, state=DrainState.STARTED),
            Routed(request_id="r1", at=1.0, reason="in_slot"),
            PrefillsReleased(at=1.0, reason="no_wait", passes=0, waited_s=0.0),
        ]
    )
    read = scrape(
        metrics,
        inspected(AdapterStanding(adapter_id=BASE, waiting=0, running=2, parked=0, oldest_at=None, reason="")),
        engine_pid=os.getpid(),
    )
    found = {
        (family.type, family.name, frozenset(label for sample in family.samples for label in sample.labels) - {"le"})
        for family in read.families.values()
    }

    # The parser takes the ending of a counter for a part of its kind.
    assert found == {(one.kind, one.name.removesuffix("_total"), frozenset(one.labels)) for one in METRICS}


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def opened(metrics: Metrics, id: str, key: str, at: float = 0.0) -> None:
    metrics.asked(id, BASE, at)
    metrics.owned([id], key, "call", key)


def test_a_request_counts_for_its_adapter_and_for_its_key():
    metrics = make()
    one_request(metrics, "a", adapter=1, key="acme")
    one_request(metrics, "b", adapter=2, key="acme")
    one_request(metrics, "c", adapter=2, key="birds")
    read = scrape(metrics)

    assert read("rota_requests_total", adapter="adapter2", outcome="length") == 2
    assert read("rota_key_requests_total", key="acme", outcome="length") == 2
    assert read("rota_key_prompt_tokens_total", key="acme") == 80
    assert read("rota_key_output_tokens_total", key="acme") == 6
    assert read("rota_key_queue_wait_seconds_sum", key="acme") == 0.5
    assert read("rota_key_output_tokens_total", key="birds") == 3


def test_open_requests_of_a_key_are_those_that_have_not_ended():
    metrics = make()
    for id in ("a", "b", "c"):
        opened(metrics, id, "acme")
    metrics.observe([Finished(request_id="b", at=1.0, reason=FinishReason.ABORT)])

    assert scrape(metrics)("rota_key_requests_open", key="acme") == 2


def test_a_request_that_the_queue_refused_counts_by_its_fault_and_has_no_prompt():
    metrics = make()
    opened(metrics, "a", "acme")
    metrics.observe([finished("a", reason=FinishReason.FAILED, fault=Fault(FaultCode.QUEUE_FULL, "Full."))])
    read = scrape(metrics)

    assert read("rota_key_requests_total", key="acme", outcome="queue_full") == 1
    assert read("rota_key_prompt_tokens_total", key="acme") == 0


def test_a_preempted_request_waits_once_for_its_key_too():
    metrics = make()
    opened(metrics, "a", "acme", at=1.0)
    metrics.observe([Admitted(request_id="a", at=at, cached_tokens=0) for at in (2.0, 9.0)])

    assert scrape(metrics)("rota_key_queue_wait_seconds_sum", key="acme") == 1.0


def test_a_limit_that_was_met_is_counted_without_a_request():
    metrics = make()
    for limit in ("tokens_per_minute", "max_tokens_in_flight", "tokens_per_minute"):
        metrics.limit_met("acme", limit, 1.0)
    read = scrape(metrics)

    assert read("rota_key_limits_met_total", key="acme", limit="tokens_per_minute") == 2
    assert read("rota_key_limits_met_total", key="acme", limit="max_tokens_in_flight") == 1
    assert read("rota_key_requests_open", key="acme") == 0


def test_keys_that_come_and_go_for_weeks_leave_a_bounded_number_of_series():
    metrics = make(most_keys=3)
    labels: set[str] = set()
    for number in range(500):
        one_request(metrics, f"r{number}", at=number * IDLE_S, key=f"key{number}")
        shown = [one.label for one in metrics.keys.shown]
        assert len(shown) <= 4
        labels.update(shown)

    assert len(labels) > 400, "an idle key gives its place to the next"


def test_a_key_with_an_open_request_keeps_its_place():
    metrics = make(most_keys=1)
    opened(metrics, "long", "acme")
    one_request(metrics, "a", at=10 * IDLE_S, key="birds")

    assert [one.label for one in metrics.keys.shown] == ["acme", "other"]


# ── the table of all ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_names_follow_the_customs_of_prometheus():
    names = [metric.name for metric in METRICS]

    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith(("rota_", "process_"))
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.sentence.endswith(".")


# ── what a step costs ─────────────────────────────────────────────────────────────────────────────────────────────────

ROWS = 256


def test_a_full_step_costs_one_call_a_token():
    """That is half a microsecond a token; a lock and a walk through buckets for each would be many calls."""
    metrics = Metrics(lambda adapter: f"adapter{adapter}")
    ids = tuple(f"cmpl-{number:032x}-0-0" for number in range(ROWS))
    for number, id in enumerate(ids):
        metrics.asked(id, number % 40, 0.0)
        metrics.owned([id], "acme", "call", "acme")
    for step in range(3):
        event = Produced(at=0.02 * step, request_ids=ids, tokens=(7,) * ROWS, step_s=0.02)
        calls, _ = calls_in(lambda event=event: metrics.observe([event]))

        assert calls < 1.1 * ROWS
