"""Weights share the slots, and whoever cannot use its share keeps nobody else from running."""

from __future__ import annotations

import pytest

from rota.core.config import SchedulerConfig
from rota.core.policy_config import PolicyConfig
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario

SLOW = {"fetch_s": 2.0, "rate_per_s": 6.0, "requests": 60, "prompt": (1, 512), "output": (1, 256)}
AT_ONCE = {"fetch_s": 0.05, "rate_per_s": 1000.0, "requests": 40, "prompt": (10, 40), "output": (8, 32)}


@pytest.mark.parametrize(
    ("rows", "slots", "adapters", "host_adapters", "max_stall_ms", "traffic", "seed"),
    [
        (256, 3, 16, 6, 1000.0, SLOW, 0),
        (256, 3, 8, 4, 1000.0, SLOW, 0),
        (4, 2, 6, 2, None, SLOW, 1),
        (2, 1, 5, 2, None, AT_ONCE, 0),
    ],
)
def test_visitors_go_on_while_the_settled_adapters_are_read(
    rows, slots, adapters, host_adapters, max_stall_ms, traffic, seed
):
    """Their tokens were withheld for settled adapters that could not run, and then nobody ran."""
    client = Client(
        requests=traffic["requests"],
        rate_per_s=traffic["rate_per_s"],
        prompt_tokens=traffic["prompt"],
        output_tokens=traffic["output"],
        adapters=adapters,
    )
    scenario = Scenario(
        name="weights",
        slots=slots,
        max_running_requests=rows,
        max_loaded_loras=host_adapters,
        fetch_s=traffic["fetch_s"],
        weights=(1.0, 2.0, 4.0, 1.0, 2.0),
        clients=(client,),
    )
    config = SchedulerConfig(chunked_prefill_size=256, max_running_requests=rows)
    policy = PolicyConfig(lora_policy="rotate", lora_max_stall_ms=max_stall_ms)
    done = Simulation(scenario=scenario, costs=read_cost("h200-llama8b"), policy=policy, seed=seed, config=config).run()

    assert len(done.records) == traffic["requests"]
    assert not done.summary()["failed"]
