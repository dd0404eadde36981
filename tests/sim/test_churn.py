"""Adapters that come and go, asked twice each, do not keep the regular ones from ending their answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rota.core.policy_config import PolicyConfig
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import read_scenario

SCENARIO = Path(__file__).parents[2] / "benchmarks/scenarios/churn.toml"


def test_regular_adapters_end_nearly_as_soon_under_rotation_as_if_adapters_kept_their_slots():
    """Turns of a fixed length took them 2.7 times as long."""
    found = read_scenario(SCENARIO)
    shorter = replace(found, transients=300, clients=(replace(found.clients[0], requests=120),))
    mean_s = {}
    for policy in ("wait", "rotate"):
        config = PolicyConfig(lora_policy=policy)
        recorder = Simulation(scenario=shorter, costs=read_cost("h200-llama8b"), policy=config, seed=11).run()
        regular = [one.ended_at - one.asked_at for id, one in recorder.records.items() if id.startswith("0-")]
        assert len(regular) == 120
        mean_s[policy] = sum(regular) / len(regular)

    assert mean_s["rotate"] <= 1.3 * mean_s["wait"]
