"""Metrics against the real scheduler, in virtual time: what is counted is what the run's recorder saw."""

from __future__ import annotations

import pytest

from rota.core.policy_config import PolicyConfig
from rota.observe.metrics import Metrics
from rota.sim.run import Simulation, adapter_name
from rota.workload.scenario import Client, Scenario
from tests.costs import constant_cost
from tests.observe.scraped import Scrape, scrape

COST = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05)
CROWD = Scenario(
    name="crowd", slots=2, clients=(Client(requests=60, rate_per_s=8.0, adapters=5, output_tokens=(20, 80)),)
)


def run(**policy) -> tuple[Simulation, Metrics, Scrape]:
    metrics = Metrics(adapter_name)
    simulation = Simulation(scenario=CROWD, costs=COST, policy=PolicyConfig(**policy), observers=[metrics])
    simulation.run()
    return simulation, metrics, scrape(metrics)


def total(read: Scrape, name: str) -> float:
    return sum(sample.value for sample in read.samples if sample.name == name)


def test_rotation_is_seen_as_turns_loads_and_evictions():
    simulation, metrics, read = run(lora_policy="rotate")
    records = simulation.recorder.records.values()

    assert read("rota_rotations_total", engine="0") > 0
    assert total(read, "rota_adapter_loads_total") - total(read, "rota_adapter_evictions_total") == len(metrics.slots)
    assert total(read, "rota_adapter_loads_total") == read("rota_adapter_load_seconds_count", engine="0")
    assert total(read, "rota_requests_total") == len(records)
    assert total(read, "rota_output_tokens_total") == sum(record.tokens for record in records)
    assert total(read, "rota_ttft_seconds_sum") == pytest.approx(sum(one.first_at - one.asked_at for one in records))
    assert read("rota_step_seconds_sum", engine="0") > 0
    assert metrics.journeys == {}


def test_every_drain_that_started_came_to_an_end():
    _, _, read = run(lora_policy="drain", lora_drain_wait_threshold=0.5)
    ends = [read("rota_drains_total", engine="0", state=state) or 0 for state in ("finished", "called_off", "expired")]

    assert read("rota_drains_total", engine="0", state="started") > 0
    assert sum(ends) > 0
    assert read("rota_rotations_total", engine="0") == 0


def test_the_delayers_verdicts_are_seen_with_what_they_held_back():
    _, _, read = run(enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.5)
    outcomes = ("wait_success", "wait_timeout")
    waited = [read("rota_prefill_delayer_outcomes_total", engine="0", reason=one) or 0 for one in outcomes]

    assert sum(waited) > 0
    held_back = read("rota_prefill_delayer_wait_passes_count", engine="0")
    assert held_back == read("rota_prefill_delayer_wait_seconds_count", engine="0")
    assert held_back >= sum(waited)
