"""Fidelity: does the simulator give what was measured, where somebody measured?"""

from __future__ import annotations

import statistics
from typing import Any

from policies.runs import DRAIN, WAIT, scenario, summaries
from policies.target import Section, Target
from rota.core.policy_config import PolicyConfig
from rota.observe.table import seconds

SEEDS = range(20)
FIGURES = (
    ("TTFT", "ttft_s", "mean"), ("TTFT", "ttft_s", "median"), ("TTFT", "ttft_s", "p99"),
    ("E2E", "e2e_s", "mean"), ("E2E", "e2e_s", "median"), ("E2E", "e2e_s", "p90"), ("E2E", "e2e_s", "p99"),
)  # fmt: skip

# In milliseconds, in the order of FIGURES; None where nobody said.
REPORTED = {
    ("a100-llama8b", "wait", 4): (7910, 83, 39550, 12060, 7051, 32928, 45870),
    ("a100-llama8b", "drain 2 s", 4): (4279, 3728, 12081, 8502, 8070, 15974, 19970),
    ("h200-llama8b-sglang", "wait", 4): (4022, 1066, 19881, 7165, 5474, None, 24762),
    ("h200-llama8b-sglang", "drain 1 s", 4): (3269, 2596, 9993, 6381, 6255, None, 15361),
    ("h200-llama8b-sglang", "wait", 10): (7823, 6790, 22615, 11421, 9216, None, 27199),
    ("h200-llama8b-sglang", "drain 1 s", 10): (3623, 2967, 11368, 7052, 6231, None, 17451),
    ("h200-llama8b-vllm", "wait", 4): (1491, 243, 7317, 3445, 3059, None, 10228),
    ("h200-llama8b-vllm", "wait", 10): (3442, 324, 14895, 5532, 4015, None, 16613),
}
POLICIES = {
    "wait": WAIT,
    "drain 2 s": DRAIN,
    "drain 1 s": PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=1.0),
}


def fidelity() -> Section:
    """`wait` varies much from seed to seed, so one measured run must lie within the spread; `drain` near the mean."""
    section = Section(
        "Fidelity: tail-ttft, 3 slots, 20 seeds", "rota simulate benchmarks/scenarios/tail-ttft.toml --seeds 20 …"
    )
    rows = []
    for (cost, policy, rate), reported in REPORTED.items():
        runs = summaries(scenario("tail-ttft", rate_per_s=float(rate)), cost, POLICIES[policy], SEEDS)
        cells, misses = [], []
        for (name, key, figure), wanted in zip(FIGURES, reported, strict=True):
            if wanted is None:
                cells.append("–")
                continue
            values = [run[key][figure] for run in runs]
            cells.append(_cell(values, wanted / 1000))
            is_judged = policy == "wait" or figure in ("mean", "p99")
            if is_judged and not _is_near(policy, values, wanted / 1000):
                misses.append(f"{name} {figure}")
        rows.append([f"{cost}, {policy}, {rate}/s", *cells])
        wanted_text = "all within the spread" if policy == "wait" else "means and P99s within 25 %"
        measured = "all" if not misses else f"all but {', '.join(misses)}"
        section.targets.append(Target(f"{cost}, {policy}, {rate}/s", wanted_text, measured, not misses))
    section.add_table(
        "mean [least – most] over seeds, and in brackets what was measured or reported there",
        ["", *(f"{name} {figure.replace('p9', 'P9')}" for name, _, figure in FIGURES)],
        rows,
    )
    return section


def _is_near(policy: str, values: list[float], wanted: float) -> bool:
    if policy == "wait":
        return min(values) <= wanted <= max(values)
    return abs(statistics.mean(values) / wanted - 1.0) <= 0.25


def _cell(values: list[float], wanted: Any) -> str:
    spread = f"[{seconds(min(values))} – {seconds(max(values))}]"
    return f"{seconds(statistics.mean(values))} {spread} ({seconds(wanted)})"
