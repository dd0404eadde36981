"""Many more adapters than slots: a thousand of them for an hour, and more work than the device can do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from policies.runs import A100, DRAIN, H200, HEADS, ROTATE, WAIT, mean, record, row, scenario
from policies.target import Section
from rota.core.policy_config import PolicyConfig
from rota.observe.summary import spread
from rota.observe.table import seconds
from rota.sim.run import adapter_name

HOUR = 180_000
DELAYING = PolicyConfig(enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.3)
OVERLOAD_SEEDS = range(5)
SHORT_QUEUE = 16


def many_adapters(requests: int = HOUR) -> Section:
    section = Section(
        "many-adapters, 1,000 adapters, 32 slots, H200",
        f"rota simulate benchmarks/scenarios/many-adapters.toml --cost {H200} --enable-prefill-delayer "
        "--prefill-delayer-queue-min-ratio 0.3",
    )
    asked = scenario("many-adapters", requests=requests)
    started_at = time.process_time()
    recorder = record(asked, H200, DELAYING, seed=0)
    summary = recorder.summary(adapter_name)
    took_s = (time.process_time() - started_at) * HOUR / requests
    undelayed = record(asked, H200, ROTATE, seed=0).summary(adapter_name)
    calmer = scenario("many-adapters", requests=10_000, rate_per_s=25.0)
    named = {
        f"rotate, delayer on, 50/s, {requests:,} requests": summary,
        f"rotate, delayer off, 50/s, {requests:,} requests": undelayed,
        "rotate, 25/s, 10,000 requests": mean(calmer, H200, ROTATE, [0]),
        "wait, 25/s, 10,000 requests": mean(calmer, H200, WAIT, [0]),
    }
    section.add_table("", HEADS, [row(name, one) for name, one in named.items()])
    served = [one for one in recorder.records.values() if one.tokens]
    half = asked.adapters // 2
    hot, cold = (
        spread([one.first_at - one.asked_at for one in served if (one.adapter_id <= half) is is_hot])["p99"]
        for is_hot in (True, False)
    )
    section.at_most("one simulated hour, processor time", took_s, 180.0)
    against = f"TTFT P99 of the colder half of the adapters ({seconds(cold)}) against the hotter ({seconds(hot)})"
    section.times_at_most(against, cold, hot, 2.0)
    return section


def overload() -> Section:
    section = Section(
        "overload, 32 Zipf adapters, 8 slots, A100, 5 seeds",
        "rota simulate benchmarks/scenarios/overload.toml --compare wait,drain,rotate --seeds 5",
    )
    at_once = record(scenario("overload", rate_per_s=1000.0), A100, ROTATE, seed=0).summary()
    capacity = at_once["requests"] / at_once["duration_s"]
    asked = scenario("overload", rate_per_s=1.5 * capacity)
    wait, drain, rotate = (mean(asked, A100, policy, OVERLOAD_SEEDS) for policy in (WAIT, DRAIN, ROTATE))
    short = {"max_queued_requests": SHORT_QUEUE}
    short_wait, short_rotate = (mean(asked, A100, policy, OVERLOAD_SEEDS, **short) for policy in (WAIT, ROTATE))
    cramped = replace(asked, max_running_requests=256)
    few_wait, few_rotate = (mean(cramped, A100, policy, OVERLOAD_SEEDS) for policy in (WAIT, ROTATE))
    named = {
        "wait": wait,
        "drain (2 s)": drain,
        "rotate": rotate,
        "wait, 256 rows": few_wait,
        "rotate, 256 rows": few_rotate,
        f"wait, at most {SHORT_QUEUE} queued": short_wait,
        f"rotate, at most {SHORT_QUEUE} queued": short_rotate,
    }
    section.add_table(
        f"All asked at once, {capacity:.1f}/s are served (rotate), so {1.5 * capacity:.1f}/s are asked.",
        HEADS,
        [row(name, summary) for name, summary in named.items()],
    )
    admitted = f"rotate, at most {SHORT_QUEUE} queued"
    section.at_most(f"{admitted}: TTFT P99", short_rotate["ttft_s"]["p99"], 2.0)
    _judge(section, f"{admitted}, against wait with its long queue", short_rotate, wait)
    _judge(section, "rotate with a long queue against wait with one", rotate, wait)
    _judge(section, "the same with 256 rows", few_rotate, few_wait)
    _judge(section, f"{admitted}, against wait with that queue, which refuses four of five", short_rotate, short_wait)
    return section


def _judge(section: Section, what: str, rotate: dict[str, Any], wait: dict[str, Any]) -> None:
    section.times_at_most(f"{what}: E2E mean", rotate["e2e_s"]["mean"], wait["e2e_s"]["mean"], 1.1)
    section.times_at_least(f"{what}: tok/s", rotate["output_tokens_per_s"], wait["output_tokens_per_s"], 1 / 1.1)
