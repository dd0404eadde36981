"""Runs of the shared scenarios, for the targets to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rota.core.policy_config import PolicyConfig
from rota.observe.observer import Observer
from rota.observe.summary import Recorder, mean_of
from rota.observe.table import seconds
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, adapter_name, scheduler_config
from rota.workload.scenario import Scenario, read_scenario

A100, H200 = "a100-llama8b", "h200-llama8b"
WAIT = PolicyConfig(lora_policy="wait")
DRAIN = PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=2.0)
ROTATE = PolicyConfig(lora_policy="rotate")

HEADS = [
    "policy", "TTFT mean", "median", "P99", "E2E mean", "median", "P90", "P99", "gap P99", "gap max", "tok/s", "failed",
]  # fmt: skip


def scenario(name: str, **changes: Any) -> Scenario:
    """A scenario by name; `changes` apply to all of its clients."""
    found = read_scenario(Path(__file__).parents[1] / "scenarios" / f"{name}.toml")
    return replace(found, clients=tuple(replace(client, **changes) for client in found.clients))


def record(
    asked: Scenario, cost: str, policy: PolicyConfig, seed: int, observers: Sequence[Observer] = (), **options: Any
) -> Recorder:
    """One run; `options` are those of the scheduler."""
    config = replace(scheduler_config(asked), **options)
    return Simulation(
        scenario=asked, costs=read_cost(cost), policy=policy, seed=seed, config=config, observers=observers
    ).run()


def summaries(
    asked: Scenario, cost: str, policy: PolicyConfig, seeds: Iterable[int], **options: Any
) -> list[dict[str, Any]]:
    return [record(asked, cost, policy, seed, **options).summary(adapter_name) for seed in seeds]


def mean(asked: Scenario, cost: str, policy: PolicyConfig, seeds: Iterable[int], **options: Any) -> dict[str, Any]:
    return mean_of(summaries(asked, cost, policy, seeds, **options))


def row(name: str, summary: dict[str, Any]) -> list[str]:
    """A line under `HEADS`."""
    figures = [
        ("ttft_s", ("mean", "median", "p99")),
        ("e2e_s", ("mean", "median", "p90", "p99")),
        ("itl_s", ("p99", "max")),
    ]
    times = [seconds(summary[key][figure]) for key, names in figures for figure in names]
    return [name, *times, f"{summary['output_tokens_per_s']:,.0f}", f"{summary['failed']:,.0f}"]
