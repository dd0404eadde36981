"""What tenants are promised without any limit, in virtual time; the table is in benchmarks/results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Scenario, read_scenario

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"


def summary_of(scenario: Scenario) -> dict:
    return Simulation(scenario=scenario, costs=read_cost("h200-llama8b"), seed=5).run().summary()


def without_tenants(scenario: Scenario) -> Scenario:
    return replace(scenario, clients=tuple(replace(client, tenant="") for client in scenario.clients))


@pytest.fixture(scope="module")
def neighbours() -> Scenario:
    return read_scenario(SCENARIOS / "neighbours.toml")


def test_a_burst_of_long_answers_does_not_delay_a_neighbour_and_loses_almost_nothing(neighbours):
    shared, plain = summary_of(neighbours), summary_of(without_tenants(neighbours))
    neighbour, burst = shared["tenants"]["neighbour"], shared["tenants"]["burst"]
    alone = summary_of(replace(neighbours, clients=neighbours.clients[:1]))

    assert neighbour["ttft_s"]["median"] <= 0.1
    assert neighbour["ttft_s"]["p99"] <= 0.5
    assert neighbour["failed"] == burst["failed"] == 0
    assert burst["output_tokens_per_s"] >= 0.95 * alone["output_tokens_per_s"]
    assert shared["output_tokens_per_s"] >= 0.95 * plain["output_tokens_per_s"]
    assert plain["ttft_s"]["p90"] > 10.0, "without tenants the neighbour waits for the burst"


@pytest.mark.long("two scenarios more; the burst with enough KV is tried without")
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(16_384, id="kv-short"),
        pytest.param(100_000, id="kv-plenty", marks=pytest.mark.long("the easier half of the same figure")),
    ],
)
def test_the_neighbour_is_as_safe_when_kv_is_short_or_plenty(neighbours, blocks):
    neighbour = summary_of(replace(neighbours, kv_blocks=blocks))["tenants"]["neighbour"]

    assert neighbour["ttft_s"]["median"] <= 0.1
    assert neighbour["ttft_s"]["p99"] <= 0.5


@pytest.mark.long("several runs of a scenario")
def test_a_tenant_with_many_adapters_does_not_keep_the_slots_from_a_tenant_with_one():
    scenario = read_scenario(SCENARIOS / "neighbours-slots.toml")
    shorter = replace(scenario, clients=tuple(replace(one, requests=one.requests // 4) for one in scenario.clients))

    one, plain = summary_of(shorter)["tenants"]["one"], summary_of(without_tenants(shorter))

    assert one["ttft_s"]["p99"] <= 0.5
    assert one["e2e_s"]["mean"] <= 1.5
    assert plain["adapters"]["65"]["e2e_s"]["mean"] > 3.0, "without tenants it waits its turn among all adapters"


def test_a_scenario_with_a_tenant_that_asks_nothing_is_refused(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[tenants.a]\nweight = 2.0\n[[clients]]\nrequests = 1\nrate_per_s = 1.0\ntenant = "b"\n')

    with pytest.raises(ConfigError, match="no client has the tenant 'a'"):
        read_scenario(path)
