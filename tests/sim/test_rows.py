"""Parked sequences need no row, so few rows serve as well as many where far more adapters have work than slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rota.core.policy_config import PolicyConfig
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import read_scenario

CROWD = Path(__file__).parents[2] / "benchmarks/scenarios/crowd.toml"


def overloaded(rows: int) -> dict[str, Any]:
    """A thousand adapters on 8 slots of an H200, at twice what it can serve, for ten seconds."""
    found = read_scenario(CROWD)
    clients = tuple(replace(client, requests=500, rate_per_s=50.0) for client in found.clients)
    scenario = replace(found, max_running_requests=rows, clients=clients)
    policy = PolicyConfig(lora_policy="rotate")
    return Simulation(scenario=scenario, costs=read_cost("h200-llama8b"), policy=policy, seed=11).run().summary()


def test_rotation_in_overload_needs_no_row_for_each_parked_sequence():
    few, many = overloaded(256), overloaded(1024)

    assert few["ttft_s"]["p99"] <= 1.1 * many["ttft_s"]["p99"]
    assert few["e2e_s"]["mean"] <= 1.05 * many["e2e_s"]["mean"]
    assert few["output_tokens_per_s"] >= 0.97 * many["output_tokens_per_s"]
