"""SGLang's report on the delayer, reproduced: prompts that are steps of their own, and answers that end one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.prefill import LONGEST, SHORTEST
from policies.runs import WAIT, mean, scenario
from policies.target import Section, Target
from rota.core.policy_config import PolicyConfig

GB200 = "gb200-qwen397b-sglang"
CONCURRENCIES = (16, 32, 64, 128)
WAVES = 10  # after that many, answers end at all moments
# What SGLang's pull request 23189 reports: 7,830 tok/s with fixed lengths and 3,846 from 80 % up, at 128 at a time; the
# queue trigger gives 1.16 times as much as without it at 16 at a time, and 1.85 times at 128.
REPORTED_FALL = 3846 / 7830
REPORTED_GAIN = {16: 1.16, 128: 1.85}
WITHIN = 0.10

DELAYER = PolicyConfig(
    lora_policy="wait",
    enable_prefill_delayer=True,
    prefill_delayer_queue_min_ratio=0.3,
    prefill_delayer_max_delay_passes=1000,  # so that the milliseconds bound the delay, as in the report
)


def delayer_report() -> Section:
    section = Section(
        "osl-variance with prompts that are steps of their own, GB200",
        f"rota simulate benchmarks/scenarios/osl-variance.toml --cost {GB200} --chunked-prefill-size 16384 …",
    )
    rows: list[list[str]] = []
    for concurrency in CONCURRENCIES:
        fixed, varied, delayed = figures(concurrency, WAVES)
        fall, gain = varied / fixed, delayed / varied
        cells = [f"{fixed:,.0f}", f"{varied:,.0f}", f"{fall:.3f} ×", f"{delayed:,.0f}", f"{gain:.3f} ×"]
        rows.append([f"{concurrency}", *cells])
        if concurrency == max(CONCURRENCIES):
            _judge(section, f"{concurrency} at a time, from 80 % up against fixed lengths", fall, REPORTED_FALL)
        if concurrency in REPORTED_GAIN:
            _judge(section, f"{concurrency} at a time, delayer on against off", gain, REPORTED_GAIN[concurrency])
    section.add_table(
        "Output tok/s; queue ratio 0.3.",
        ["at a time", "fixed", "0.8, delayer off", "of fixed", "0.8, delayer on", "of off"],
        rows,
    )
    return section


def figures(concurrency: int, waves: int, cost: str = GB200) -> tuple[float, float, float]:
    """Output tokens a second: with fixed lengths, with lengths from 80 % up, and with these and the delayer."""
    asked = ((LONGEST, WAIT), (SHORTEST, WAIT), (SHORTEST, DELAYER))
    fixed, varied, delayed = (
        _run(concurrency, waves, low, policy, cost)["output_tokens_per_s"] for low, policy in asked
    )
    return fixed, varied, delayed


def _judge(section: Section, what: str, value: float, reported: float) -> None:
    is_held = abs(value - reported) <= WITHIN * reported
    section.targets.append(Target(what, f"{reported:.2f} × ± 10 %", f"{value:.3f} ×", is_held))


def _run(concurrency: int, waves: int, low: int, policy: PolicyConfig, cost: str) -> dict[str, Any]:
    lengths = {"prompt_tokens": (low, LONGEST), "output_tokens": (low, LONGEST)}
    asked = scenario("osl-variance", requests=waves * concurrency, concurrency=concurrency, **lengths)
    # Far more rows than requests, as in the report: only the queue can hold prompts back.
    roomy = replace(asked, max_running_requests=1024)
    return mean(roomy, cost, policy, [0], chunked_prefill_size=16_384)
