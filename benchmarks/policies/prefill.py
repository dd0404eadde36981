"""Answers that end one by one, each refilled alone: what it costs, and what the delayer gives back."""

from __future__ import annotations

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
    best = dict.fromkeys(CONCURRENCIES, (0.0, 0.0))
    for way, (policy, chunk) in WAYS.items():
        for concurrency in CONCURRENCIES:
            fixed, varied = (_run(concurrency, low, policy, chunk) for low in (LONGEST, SHORTEST))
            share = varied["output_tokens_per_s"] / fixed["output_tokens_per_s"]
            gap = varied["itl_s"]["p99"] / fixed["itl_s"]["p99"]
            rows.append([way, f"{concurrency}", *_cells(fixed), *_cells(varied), f"{share:.1%}", f"{gap:.2f} ×"])
            if chunk == 2048 and gap <= MOST_GAP:
                best[concurrency] = max(best[concurrency], (share, gap))
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
    for concurrency, (share, gap) in best.items():
        what = f"{concurrency} at a time, delayer off or on: tok/s at ratio 0.8 of fixed, and token gap P99"
        is_held = share >= LEAST_SHARE and gap <= MOST_GAP
        section.targets.append(Target(what, "≥ 95 %, ≤ 2 ×", f"{share:.1%}, {gap:.2f} ×", is_held))
    return section


def _run(concurrency: int, low: int, policy: PolicyConfig, chunk: int) -> dict[str, Any]:
    lengths = {"prompt_tokens": (low, LONGEST), "output_tokens": (low, LONGEST)}
    asked = scenario("osl-variance", requests=max(512, WAVES * concurrency), concurrency=concurrency, **lengths)
    return mean(
        replace(asked, max_running_requests=max(256, concurrency)), H200, policy, [0], chunked_prefill_size=chunk
    )


def _cells(summary: dict[str, Any]) -> list[str]:
    gap_ms, ttft_ms = summary["itl_s"]["p99"] * 1000, summary["ttft_s"]["mean"] * 1000
    return [f"{summary['output_tokens_per_s']:,.0f}", f"{gap_ms:.1f} ms", f"{ttft_ms:.0f} ms"]
