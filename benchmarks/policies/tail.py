"""Six adapters on three slots: rotation against draining, in every column at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.runs import A100, DRAIN, HEADS, ROTATE, WAIT, mean, record, row, scenario
from policies.target import Section, Target
from rota.core.events import SlotState
from rota.core.ids import AdapterId
from rota.observe.summary import RequestRecord, spread
from rota.sim.plot import Tenures
from rota.sim.run import STARTS_AT
from rota.workload.scenario import Scenario

SEEDS = range(10)
OTHER_SEEDS = range(100, 110)  # quantum and stall limit were chosen while looking at the first ten
WINDOW_S = 10.0


def tail_ttft(rate: float) -> Section:
    section = Section(
        f"tail-ttft, 3 slots, {rate:g}/s, A100, 10 seeds",
        "rota simulate benchmarks/scenarios/tail-ttft.toml --compare wait,drain,rotate --seeds 10",
    )
    asked = scenario("tail-ttft", rate_per_s=rate)
    wait, drain, rotate = (mean(asked, A100, policy, SEEDS) for policy in (WAIT, DRAIN, ROTATE))
    roomy = mean(replace(asked, slots=6), A100, ROTATE, SEEDS)
    other_drain, other_rotate = (mean(asked, A100, policy, OTHER_SEEDS) for policy in (DRAIN, ROTATE))
    named = {
        "wait": wait,
        "drain (2 s)": drain,
        "rotate": rotate,
        "slots for all six": roomy,
        "drain (2 s), ten other seeds": other_drain,
        "rotate, ten other seeds": other_rotate,
    }
    section.add_table("", HEADS, [row(name, summary) for name, summary in named.items()])
    _judge(section, "", rotate, drain)
    _judge(section, ", ten other seeds", other_rotate, other_drain)
    ratios = spread([ratio for seed in range(4) for ratio in slot_time_ratios(asked, seed)])
    measured = f"{ratios['max']:.2f} × (median {ratios['median']:.2f} ×)"
    what = "slot time over any 10 s, most to least of the adapters that always have work"
    section.targets.append(Target(what, "≤ 2 ×", measured, ratios["max"] <= 2.0))
    return section


def _judge(section: Section, where: str, rotate: dict[str, Any], drain: dict[str, Any]) -> None:
    section.at_most(f"TTFT P99{where}", rotate["ttft_s"]["p99"], 0.5)
    section.at_most(f"TTFT median{where}", rotate["ttft_s"]["median"], 0.1)
    for figure, limit in (("mean", 0.95), ("p90", 1.0), ("p99", 1.0)):
        what = f"E2E {figure.replace('p9', 'P9')} against drain{where}"
        section.times_at_most(what, rotate["e2e_s"][figure], drain["e2e_s"][figure], limit)
    tokens = "output_tokens_per_s"
    section.times_at_least(f"tok/s against drain{where}", rotate[tokens], drain[tokens], 1.05)
    section.at_most(f"token gap P99{where}", rotate["itl_s"]["p99"], 0.3)
    section.at_most(f"token gap max{where}", rotate["itl_s"]["max"], 1.5)


def slot_time_ratios(asked: Scenario, seed: int) -> Iterable[float]:
    """How unequally slot time is shared, window by window, among those who have work all through it."""
    tenures = Tenures()
    recorder = record(asked, A100, ROTATE, seed, observers=[tenures])
    tenures.close()
    records = list(recorder.records.values())
    at = STARTS_AT
    while at + WINDOW_S <= tenures.last_at:
        busy = [adapter for adapter in recorder.gaps if _has_work(records, adapter, at)]
        held = [
            sum(
                _overlap(begun.at, until, at)
                for begun, until in tenures.closed
                if begun.adapter_id == adapter and begun.state is SlotState.READY
            )
            for adapter in busy
        ]
        if len(held) > 1:
            yield max(held) / min(held)
        at += 1.0


def _has_work(records: list[RequestRecord], adapter: AdapterId, at: float) -> bool:
    """All through the window that begins at `at`?"""
    covered_until = at
    for one in sorted((one for one in records if one.adapter_id == adapter), key=lambda one: one.asked_at):
        if one.asked_at <= covered_until:
            covered_until = max(covered_until, one.ended_at)
    return covered_until >= at + WINDOW_S


def _overlap(since: float, until: float, at: float) -> float:
    return max(0.0, min(until, at + WINDOW_S) - max(since, at))
