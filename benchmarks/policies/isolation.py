"""Base requests beside adapters: the one should not feel the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.runs import HEADS, ROTATE, WAIT, mean, record, row, scenario
from policies.target import Section
from rota.core.ids import BASE
from rota.core.policy_config import PolicyConfig
from rota.observe.summary import Recorder, mean_of
from rota.workload.scenario import Scenario

SEEDS = range(10)


def base_isolation(cost: str) -> Section:
    section = Section(
        f"base-isolation, 8 slots, {cost}, 10 seeds",
        f"rota simulate benchmarks/scenarios/base-isolation.toml --cost {cost} --seeds 10 --per-adapter",
    )
    asked = scenario("base-isolation")
    alone = mean(replace(asked, clients=asked.clients[:1]), cost, ROTATE, SEEDS)
    rows = [row("base alone", alone)]
    for name, policy in (("wait", WAIT), ("rotate", ROTATE)):
        base, adapters = _beside(asked, cost, policy)
        rows += [row(f"base beside adapters, {name}", base), row(f"adapters, {name}", adapters)]
    section.add_table("", HEADS, rows)
    section.times_at_most("base TTFT mean against alone", base["ttft_s"]["mean"], alone["ttft_s"]["mean"], 1.3)
    section.times_at_most("base E2E mean against alone", base["e2e_s"]["mean"], alone["e2e_s"]["mean"], 1.3)
    section.at_most("adapters' TTFT P99", adapters["ttft_s"]["p99"], 1.0)
    return section


def _beside(asked: Scenario, cost: str, policy: PolicyConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """How base requests fared, and how all the others did."""
    runs = [record(asked, cost, policy, seed) for seed in SEEDS]
    base, adapters = (mean_of([_part(run, is_base).summary() for run in runs]) for is_base in (True, False))
    return base, adapters


def _part(recorder: Recorder, is_base: bool) -> Recorder:
    records = {name: one for name, one in recorder.records.items() if (one.adapter_id == BASE) is is_base}
    return Recorder(records, {one.adapter_id: one.gaps[0] for one in records.values()})
