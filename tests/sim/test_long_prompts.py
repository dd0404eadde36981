"""Chats beside prompts of 8,192 to 32,000 tokens: their first tokens come soon, and the long prompts hardly notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rota.observe.summary import spread
from rota.sim.cost import LinearCost
from rota.sim.run import Simulation
from rota.workload.scenario import read_scenario

SCENARIO = Path(__file__).parents[2] / "benchmarks/scenarios/long-prompts.toml"
# Seconds to the first token with the same seed while prompts went by arrival; the chats' P99 was 1.37 s.
LONG_MEAN_BY_ARRIVAL, LONG_MAX_BY_ARRIVAL = 0.745, 1.941
# The costs by which these were simulated: an H200 with Llama-8B, as fitted before it timed its own steps.
COSTS = LinearCost(
    name="h200, 2026-11-15",
    base_s=0.004713,
    prefill_s=0.003762,
    lora_s=0.0003304,
    sequence_s=3.228e-05,
    prompt_token_s=1.728e-05,
    context_token_s=2.184e-08,
    adapter_s=9.85e-05,
    load_s=0.0023,
    fetch_s=0.05,
    prefix_pair_s=1.4e-09,
)


def test_short_chats_do_not_wait_for_long_prompts():
    asked = replace(read_scenario(SCENARIO), slots=6)
    recorder = Simulation(scenario=asked, costs=COSTS, seed=14).run()
    chats, documents = (
        [one.first_at - one.asked_at for id, one in recorder.records.items() if id.startswith(client)]
        for client in ("0-", "1-")
    )

    assert spread(chats)["p99"] <= 0.2
    assert spread(documents)["mean"] <= 1.1 * LONG_MEAN_BY_ARRIVAL
    assert max(documents) <= 1.3 * LONG_MAX_BY_ARRIVAL
