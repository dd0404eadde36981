"""Answers that end one by one, each refilled alone: what it costs, and what the delayer gives back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.runs import H200, ROTATE, mean, scenario
from policies.target import Section, Target
from rota.core.policy_config import PolicyConfig

CONCURRENCIES = (16, 32, 64, 128)
WAVES = 8  # so that the beginning and the end, when all start and stop together, weigh little
LONGEST = 1024
SHORTEST = 819  # at a range ratio of 0.8

LEAST_SHARE, MOST_GAP = 0.95, 2.0

Outcome = tuple[float, float]  # throughput and token gap P99 at ratio 0.8, as shares of those with fixed lengths

DELAYER = PolicyConfig(enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.3)
WAYS: dict[str, tuple[PolicyConfig, int]] = {
    "delayer off": (ROTATE, 2048),
    "delayer on, queue ratio 0.3": (DELAYER, 2048),
    "chunks of 512 mixed in": (ROTATE, 512),
}


def osl_variance() -> Section:
    section = Section(
        "osl-variance, closed loop, in and out 1024, H200",
        f"rota simulate benchmarks/scenarios/osl-variance.toml --cost {H200} …",
    )
    rows: list[list[str]] = []
    found: dict[str, dict[int, Outcome]] = {}
    for way, (policy, chunk) in WAYS.items():
        found[way] = {}
        for concurrency in CONCURRENCIES:
            fixed, varied = (_run(concurrency, low, policy, chunk) for low in (LONGEST, SHORTEST))
            share = varied["output_tokens_per_s"] / fixed["output_tokens_per_s"]
            gap = varied["itl_s"]["p99"] / fixed["itl_s"]["p99"]
            found[way][concurrency] = (share, gap)
            rows.append([way, f"{concurrency}", *_cells(fixed), *_cells(varied), f"{share:.2%}", f"{gap:.2f} ×"])
    section.add_table(
        "Steps always mix prompts into decodes here, up to 2048 tokens unless said otherwise.",
        [
            "",
            "at a time",
            "fixed tok/s",
            "gap P99",
            "TTFT mean",
            "0.8 tok/s",
            "gap P99",
            "TTFT mean",
            "tok/s",
            "gap P99",
        ],
        rows,
    )
    for way, outcomes in found.items():
        _judge(section, f"{way}, worst of all concurrencies", outcomes.values())
    full = [outcomes for way, outcomes in found.items() if WAYS[way][1] == 2048]
    chosen = [_better([outcomes[concurrency] for outcomes in full]) for concurrency in CONCURRENCIES]
    _judge(section, "delayer off or on, whichever is better at each concurrency", chosen)
    return section


def _better(outcomes: list[Outcome]) -> Outcome:
    return max(outcomes, key=lambda outcome: (outcome[1] <= MOST_GAP, outcome[0]))


def _judge(section: Section, what: str, outcomes: Iterable[Outcome]) -> None:
    shares, gaps = zip(*outcomes, strict=True)
    is_held = min(shares) >= LEAST_SHARE and max(gaps) <= MOST_GAP
    measured = f"{min(shares):.2%}, {max(gaps):.2f} ×"
    section.targets.append(Target(f"{what}: tok/s of fixed, gap P99", "≥ 95 %, ≤ 2 ×", measured, is_held))


def _run(concurrency: int, low: int, policy: PolicyConfig, chunk: int) -> dict[str, Any]:
    lengths = {"prompt_tokens": (low, LONGEST), "output_tokens": (low, LONGEST)}
    asked = scenario("osl-variance", requests=max(512, WAVES * concurrency), concurrency=concurrency, **lengths)
    return mean(
        replace(asked, max_running_requests=max(256, concurrency)), H200, policy, [0], chunked_prefill_size=chunk
    )


def _cells(summary: dict[str, Any]) -> list[str]:
    gap_ms, ttft_ms = summary["itl_s"]["p99"] * 1000, summary["ttft_s"]["mean"] * 1000
    return [f"{summary['output_tokens_per_s']:,.0f}", f"{gap_ms:.1f} ms", f"{ttft_ms:.0f} ms"]
