"""Compares slot policies over the scenarios that turns are judged by, simulated.

    python -m benchmarks.simulated_turns [--only CASE …] [--policies rotate wait] [--seeds 401 402] [--output FILE]
                                         [--max-stall-ms 1000]

Each row has the means over the seeds. `pause` is the longest time between two tokens of an answer, `stall` the longest
time that a reader of twenty tokens a second stands without text. In `crowd` and `crowd-heavy` all adapters lie in host
memory. `…-unknown` and `crowd-heavy` ask for 4,096 tokens with every request, so no answer's length is known before.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rota.core.policy_config import PolicyConfig
from rota.observe.summary import mean_of
from rota.observe.table import seconds
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Scenario, read_scenario

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario on a device, perhaps with another rate."""

    scenario: str
    rate_per_s: float | None = None
    device: str = "h200"
    host_adapters: int | None = None

    def read(self) -> Scenario:
        found = read_scenario(SCENARIOS / f"{self.scenario}.toml")
        first, *others = found.clients
        first = replace(first, rate_per_s=self.rate_per_s or first.rate_per_s)
        copies = self.host_adapters or found.max_loaded_loras
        return replace(found, clients=(first, *others), max_loaded_loras=copies)


CASES = {
    "tail-h200-4": Case("tail-ttft"),
    "tail-h200-10": Case("tail-ttft", 10.0),
    "tail-a100-4": Case("tail-ttft", device="a100"),
    "tail-h200-4-unknown": Case("tail-ttft-unknown"),
    "tail-h200-10-unknown": Case("tail-ttft-unknown", 10.0),
    "tail-a100-4-unknown": Case("tail-ttft-unknown", device="a100"),
    "many-200": Case("many-200", host_adapters=200),
    "crowd-11": Case("crowd", 11.0, host_adapters=1000),
    "crowd-15.4": Case("crowd", 15.4, host_adapters=1000),
    "crowd-22": Case("crowd", 22.0, host_adapters=1000),
    "crowd-heavy": Case("crowd-heavy", host_adapters=1000),
    "churn": Case("churn"),
    "slow-disk": Case("slow-disk"),
    "pressure": Case("pressure", device="a100"),
}
HEADS = [
    "case", "policy", "TTFT median / P99", "E2E mean / P99", "token gap P99", "pause median / P99 / max",
    "stall median / P99", "tok/s",
]  # fmt: skip


def measure(case: Case, policy: str, max_stall_ms: float | None, seeds: list[int]) -> dict[str, Any]:
    scenario, costs = case.read(), read_cost(f"{case.device}-llama8b")
    config = PolicyConfig(lora_policy=policy, lora_max_stall_ms=max_stall_ms)
    runs = [Simulation(scenario=scenario, costs=costs, policy=config, seed=seed) for seed in seeds]
    for one in runs:
        one.run()
    return mean_of([one.summary() for one in runs])


def row(name: str, policy: str, found: dict[str, Any]) -> list[str]:
    def times(key: str, *figures: str) -> str:
        return " / ".join(seconds(found[key][figure]) for figure in figures)

    return [
        name,
        f"`{policy}`",
        times("ttft_s", "median", "p99"),
        times("e2e_s", "mean", "p99"),
        times("itl_s", "p99"),
        times("gap_s", "median", "p99", "max"),
        times("stall_s", "median", "p99"),
        f"{found['output_tokens_per_s']:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", default=["rotate", "drain", "wait"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[401, 402, 403, 404])
    parser.add_argument("--max-stall-ms", type=float, help="a pause that `rotate` promises")
    parser.add_argument("--output", type=Path, help="append the table to this file")
    asked = parser.parse_args()
    lines = [HEADS, ["---"] * len(HEADS)]
    for name in asked.only:
        for policy in asked.policies:
            lines.append(row(name, policy, measure(CASES[name], policy, asked.max_stall_ms, asked.seeds)))
            print(" | ".join(lines[-1]), flush=True)
    if asked.output:
        with asked.output.open("a") as file:
            file.write("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
