"""Four ranks whose steps do not mix prompts in, with and without the delayer, beside SGLang's figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.prefill import LONGEST, SHORTEST
from policies.prefill_alone import CONCURRENCIES, DELAYER, GB200, REPORTED_FALL, REPORTED_GAIN
from policies.runs import scenario
from policies.target import Section, Target
from rota.core.policy_config import PolicyConfig
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, scheduler_config

RANKS, WAVES = 4, 4
# A delayer that may delay for no pass: its ranks exchange reports, so they still wait for each other where they gather.
NEVER = replace(DELAYER, prefill_delayer_queue_min_ratio=None, prefill_delayer_max_delay_passes=1)


def ranks() -> Section:
    section = Section(
        f"osl-variance on {RANKS} ranks with prompts that are steps of their own, GB200",
        "python benchmarks/simulated_fleet.py --only ranks",
    )
    for exchange, what in (
        ("all-gather", "All-gather: a step lasts as long as the longest rank's"),
        ("board", "Board: ranks compute on their own"),
    ):
        rows: list[list[str]] = []
        for each in CONCURRENCIES:
            fixed, varied, delayed = figures(each, exchange)
            totals = [one["output_tokens_per_s"] for one in (fixed, varied, delayed)]
            gaps = [f"{one['itl_s']['p99'] * 1000:.0f}" for one in (fixed, varied, delayed)]
            fall, gain = totals[1] / totals[0], totals[2] / totals[1]
            shown = [f"{total:,.0f}" for total in totals]
            rows.append([f"{each}", shown[0], shown[1], f"{fall:.3f} ×", shown[2], f"{gain:.3f} ×", " / ".join(gaps)])
            if exchange == "all-gather":
                _judge(section, each, fall, gain)
        heads = ["at a time on each", "fixed", "0.8, off", "of fixed", "0.8, on", "of off", "gap P99 in ms"]
        section.add_table(f"{what}. Output tok/s of all ranks; queue ratio 0.3.", heads, rows)
    return section


def figures(each: int, exchange: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Fixed lengths, lengths from 80 % up, and these with the delayer."""
    off, on = (replace(one, prefill_delayer_exchange=exchange) for one in (NEVER, DELAYER))
    return _run(each, LONGEST, off), _run(each, SHORTEST, off), _run(each, SHORTEST, on)


def _run(each: int, low: int, policy: PolicyConfig) -> dict[str, Any]:
    lengths = {"prompt_tokens": (low, LONGEST), "output_tokens": (low, LONGEST)}
    asked = scenario("osl-variance", requests=WAVES * RANKS * each, concurrency=RANKS * each, **lengths)
    roomy = replace(asked, max_running_requests=1024)
    config = replace(scheduler_config(roomy), chunked_prefill_size=16_384)
    run = Simulation(scenario=roomy, costs=read_cost(GB200), policy=policy, config=config, replicas=RANKS)
    run.run()
    return run.summary()


def _judge(section: Section, each: int, fall: float, gain: float) -> None:
    """Four ranks interrupt each other, so they lose at least what one loses, and gain at least as much back."""
    if each == max(CONCURRENCIES):
        what = f"{each} at a time on each, from 80 % up against fixed lengths"
        section.targets.append(Target(what, f"≤ {REPORTED_FALL:.2f} ×", f"{fall:.3f} ×", fall <= REPORTED_FALL))
    if each in REPORTED_GAIN:
        what, least = f"{each} at a time on each, delayer on against off", REPORTED_GAIN[each]
        section.targets.append(Target(what, f"≥ {least:.2f} ×", f"{gain:.3f} ×", gain >= least))
