"""Measures what deciding costs: plan and commit for many running sequences, with a long queue and without.

python benchmarks/scheduler_cost.py [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from rota.core.config import Capacity, SchedulerConfig
from rota.core.ids import RequestId
from rota.core.messages import Submit
from rota.core.plan import StepResult
from rota.core.request import Request, SamplingParams
from rota.scheduler import Scheduler

RUNNING = 256
STEPS = 1000


def submit(number: int, prompt: int) -> Submit:
    sampling = SamplingParams(max_new_tokens=100_000, stop_token_ids=frozenset({2}))
    tokens = tuple(number * 31 % 997 + i for i in range(prompt))
    return Submit(Request(RequestId(f"cmpl-{number:08d}"), tokens, sampling, arrived_at=float(number)))


def seconds_a_step(waiting: int) -> list[float]:
    """Steady decoding of `RUNNING` sequences while `waiting` others cannot sit down."""
    capacity = Capacity(blocks=RUNNING * 200, block_size=16, rows=RUNNING, max_sequence_tokens=8192)
    scheduler = Scheduler(SchedulerConfig(max_queued_requests=max(waiting, RUNNING)), capacity)
    for number in range(RUNNING):
        scheduler.apply(submit(number, prompt=200))
    while True:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, StepResult(0.0, (7,) * len(plan.sampled_rows)))
        if len(plan.decodes) == RUNNING:
            break
    for number in range(waiting):
        scheduler.apply(submit(RUNNING + number, prompt=200))

    taken: list[float] = []
    for _ in range(STEPS):
        started_at = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned_at = time.perf_counter()
        result = StepResult(0.0, (7,) * RUNNING)
        committing_at = time.perf_counter()
        scheduler.commit(plan, result)
        taken.append(time.perf_counter() - committing_at + planned_at - started_at)
        assert len(plan.decodes) == RUNNING
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args()
    gc.freeze()
    results = {}
    for waiting in (0, 10_000):
        taken = seconds_a_step(waiting)
        results[f"waiting_{waiting}"] = {
            "running": RUNNING,
            "median_us": round(statistics.median(taken) * 1e6, 1),
            "p99_us": round(statistics.quantiles(taken, n=100)[98] * 1e6, 1),
        }
    for name, numbers in results.items():
        print(f"{name:16} median {numbers['median_us']:7.1f} µs   p99 {numbers['p99_us']:7.1f} µs")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
