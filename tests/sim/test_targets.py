"""What the policies promise at equal places, held with margin on few seeds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rota.core.policy_config import PolicyConfig
from rota.observe.summary import Recorder, mean_of
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, adapter_name, scheduler_config
from rota.workload.scenario import Scenario, read_scenario

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
# The constants of `rotate` were chosen while looking at these; the reports are made with others.
SEEDS = (11, 12, 13, 14)
SECOND_LOAD = pytest.mark.long("the same figures at a second load")
POLICIES = {
    "wait": PolicyConfig(lora_policy="wait"),
    "drain": PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=2.0),
    "rotate": PolicyConfig(lora_policy="rotate"),
    "promise": PolicyConfig(lora_policy="rotate", lora_max_stall_ms=1000.0),
}
# SGLang's own table of tail-ttft on an A100, in seconds.
REPORTED_WAIT = {"ttft_s": {"mean": 7.91, "p99": 39.55}, "e2e_s": {"mean": 12.06, "p90": 32.93, "p99": 45.87}}
REPORTED_DRAIN = {"ttft_s": {"mean": 4.279, "p99": 12.081}, "e2e_s": {"mean": 8.502, "p99": 19.97}}


def tail_ttft(rate: float) -> Scenario:
    """Six adapters on three slots: three places on the device, and no more."""
    found = read_scenario(SCENARIOS / "tail-ttft.toml")
    return replace(found, slots=3, clients=tuple(replace(client, rate_per_s=rate) for client in found.clients))


def simulated(scenario: Scenario, device: str, policy: str, seed: int) -> Recorder:
    recorder = Simulation(scenario=scenario, costs=read_cost(device), policy=POLICIES[policy], seed=seed).run()
    recorder.settle()
    return recorder


@cache
def runs(policy: str, rate: float, device: str = "a100-llama8b") -> list[dict[str, Any]]:
    return [simulated(tail_ttft(rate), device, policy, seed).summary() for seed in SEEDS]


def mean(policy: str, rate: float, device: str = "a100-llama8b") -> dict[str, Any]:
    return mean_of(runs(policy, rate, device))


# ── few adapters ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rate", [4.0, pytest.param(8.0, marks=SECOND_LOAD)])
def test_at_equal_places_rotation_is_ahead_of_draining_in_every_column_at_once(rate):
    drain, rotate = mean("drain", rate), mean("rotate", rate)

    assert rotate["ttft_s"]["p99"] <= 0.25
    assert rotate["ttft_s"]["median"] <= 0.09
    for name, figures in REPORTED_WAIT.items():  # the columns of that table
        for figure in figures:
            assert rotate[name][figure] <= (0.05 if name == "ttft_s" else 1.0) * drain[name][figure], (name, figure)
    assert rotate["output_tokens_per_s"] >= drain["output_tokens_per_s"]
    assert rotate["itl_s"]["p99"] <= 0.38
    assert rotate["itl_s"]["max"] <= 0.7


def test_on_an_a100_first_tokens_come_at_once_and_answers_take_no_longer_than_was_aimed_at():
    rotate = mean("rotate", 4.0)

    assert rotate["ttft_s"]["p99"] <= 0.18
    assert rotate["ttft_s"]["median"] <= 0.08
    assert rotate["e2e_s"]["mean"] <= 8.2


@pytest.mark.parametrize(
    ("rate", "ttft_p99", "e2e_mean", "e2e_p99", "gap_p99", "gap_max"),
    [(4.0, 0.06, 2.5, 5.6, 0.115, 0.2), pytest.param(10.0, 0.1, 3.4, 7.0, 0.15, 0.22, marks=SECOND_LOAD)],
)
def test_on_an_h200_neither_first_tokens_nor_answers_nor_pauses_are_long(
    rate, ttft_p99, e2e_mean, e2e_p99, gap_p99, gap_max
):
    rotate = mean("rotate", rate, "h200-llama8b")

    assert rotate["ttft_s"]["median"] <= 0.03
    assert rotate["ttft_s"]["p99"] <= ttft_p99
    assert rotate["e2e_s"]["mean"] <= e2e_mean
    assert rotate["e2e_s"]["p99"] <= e2e_p99
    assert rotate["itl_s"]["p99"] <= gap_p99
    assert rotate["itl_s"]["max"] <= gap_max


# ── little KV ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long("nine runs for one figure")
def test_with_little_kv_rotation_is_ahead_of_the_better_of_waiting_and_draining():
    scenario = read_scenario(SCENARIOS / "pressure.toml")
    wait, drain, rotate = (
        mean_of([simulated(scenario, "a100-llama8b", policy, seed).summary() for seed in SEEDS[:3]])
        for policy in ("wait", "drain", "rotate")
    )

    assert rotate["e2e_s"]["mean"] <= 0.95 * min(wait["e2e_s"]["mean"], drain["e2e_s"]["mean"])
    assert rotate["e2e_s"]["p99"] <= min(wait["e2e_s"]["p99"], drain["e2e_s"]["p99"])
    assert rotate["output_tokens_per_s"] >= 0.99 * max(wait["output_tokens_per_s"], drain["output_tokens_per_s"])


# ── a crowd ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def crowd(policy: str) -> Recorder:
    """A thousand adapters on eight slots at seven tenths of what the device can do, for half a minute."""
    found = read_scenario(SCENARIOS / "crowd.toml")
    shorter = replace(found.clients[0], rate_per_s=0.7 * 22.0, requests=500)
    return simulated(replace(found, clients=(shorter,)), "h200-llama8b", policy, seed=11)


def test_in_a_crowd_first_tokens_come_long_before_those_of_waiting_and_answers_hardly_later():
    wait, rotate = crowd("wait").summary(), crowd("rotate").summary()

    assert rotate["ttft_s"]["p99"] <= 0.2 * wait["ttft_s"]["p99"]
    assert rotate["e2e_s"]["mean"] <= 1.05 * wait["e2e_s"]["mean"]
    assert rotate["e2e_s"]["p99"] <= 1.2 * wait["e2e_s"]["p99"]
    assert rotate["itl_s"]["p99"] <= 1.0
    assert rotate["gap_s"]["max"] <= 3.0, "one round of turns over all that are parked"


def test_a_promise_of_a_second_is_kept_for_99_of_100_answers_in_a_crowd():
    promise, wait = crowd("promise"), crowd("wait").summary()
    pauses = sorted(one.worst_gap_s for one in promise.records.values())

    assert pauses[int(0.99 * len(pauses))] <= 1.0
    assert promise.summary()["ttft_s"]["p99"] <= 0.6 * wait["ttft_s"]["p99"]
    unpromised = max(one.worst_gap_s for one in crowd("rotate").records.values())
    assert unpromised > 1.0, "without a promise the wait moves behind the first token"


# ── urgency ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long("several runs of a scenario")
def test_an_urgent_request_of_an_adapter_that_ran_lately_keeps_its_head_start():
    """It was 394 ms in the mean while the adapter's last turn counted against it."""
    scenario = read_scenario(SCENARIOS / "urgent.toml")
    waits = [
        one.first_at - one.asked_at
        for seed in SEEDS
        for one in simulated(scenario, "h200-llama8b", "rotate", seed).records.values()
        if one.prompt_tokens == 100
    ]

    assert len(waits) == len(SEEDS)
    assert sum(waits) / len(waits) <= 0.06
    assert max(waits) <= 0.15


# ── what was measured elsewhere ──────────────────────────────────────────────────────────────────────────────────────


def test_draining_in_virtual_time_fares_as_it_was_reported():
    drain = mean("drain", 4.0)

    for name, figures in REPORTED_DRAIN.items():
        for figure, reported in figures.items():
            assert drain[name][figure] == pytest.approx(reported, rel=0.25), (name, figure)


@pytest.mark.long("four runs for one figure; `drain` is compared with its report in `make test`")
def test_waiting_in_virtual_time_varies_around_what_was_reported():
    seen = [simulated(tail_ttft(4.0), "a100-llama8b", "wait", seed).summary() for seed in range(4)]

    for name, figures in REPORTED_WAIT.items():
        for figure, reported in figures.items():
            values = [run[name][figure] for run in seen]
            assert 0.9 * min(values) <= reported <= 1.1 * max(values), (name, figure)


def test_where_slots_suffice_policies_make_no_difference():
    cost, scenario = read_cost("a100-llama8b"), replace(tail_ttft(4.0), slots=6)
    wait, rotate = (
        Simulation(scenario=scenario, costs=cost, policy=POLICIES[name]).run().summary() for name in ("wait", "rotate")
    )

    assert wait == rotate


def base_part(recorder: Recorder) -> dict[str, Any]:
    return recorder.summary(adapter_name)["adapters"]["base"]


@pytest.mark.long("several runs of a scenario")
def test_base_requests_hardly_feel_the_adapters_beside_them():
    beside = read_scenario(SCENARIOS / "base-isolation.toml")
    alone = replace(beside, clients=beside.clients[:1])
    cost = read_cost("h200-llama8b")
    quiet, busy = (
        mean_of([base_part(Simulation(scenario=one, costs=cost, seed=seed).run()) for seed in range(2)])
        for one in (alone, beside)
    )

    assert busy["ttft_s"]["mean"] <= 1.3 * quiet["ttft_s"]["mean"]
    assert busy["e2e_s"]["mean"] <= 1.5 * quiet["e2e_s"]["mean"]


def test_adapters_beside_base_requests_get_their_first_token_within_a_second():
    recorder = Simulation(
        scenario=read_scenario(SCENARIOS / "base-isolation.toml"), costs=read_cost("h200-llama8b")
    ).run()

    assert all(one.first_at - one.asked_at < 1.0 for one in recorder.records.values())


@pytest.mark.long("several runs of a scenario")
def test_overload_costs_admitted_requests_neither_their_first_token_nor_their_answer():
    """One and a half times what the device can do: with a short queue, against `wait` with a queue without end."""
    overload, cost = read_scenario(SCENARIOS / "overload.toml"), read_cost("a100-llama8b")
    short = replace(scheduler_config(overload), max_queued_requests=16)
    wait = simulated(overload, "a100-llama8b", "wait", seed=11).summary()
    rotate = Simulation(scenario=overload, costs=cost, policy=POLICIES["rotate"], config=short, seed=11).run().summary()

    assert rotate["ttft_s"]["p99"] <= 6.0
    assert rotate["e2e_s"]["mean"] <= 1.1 * wait["e2e_s"]["mean"]
    assert rotate["output_tokens_per_s"] >= wait["output_tokens_per_s"] / 1.1


@pytest.mark.long("several runs of a scenario")
def test_a_cold_adapter_does_not_pay_for_being_cold():
    found = read_scenario(SCENARIOS / "many-adapters.toml")
    crowd = replace(found, clients=(replace(found.clients[0], requests=1500, adapters=200, rate_per_s=25.0),))
    recorder = Simulation(scenario=replace(crowd, slots=8), costs=read_cost("h200-llama8b")).run()
    waits = {
        is_hot: sorted(
            one.first_at - one.asked_at for one in recorder.records.values() if (one.adapter_id <= 100) is is_hot
        )
        for is_hot in (True, False)
    }
    hot, cold = (ordered[int(0.99 * len(ordered))] for ordered in (waits[True], waits[False]))

    assert cold <= 2.0 * hot
