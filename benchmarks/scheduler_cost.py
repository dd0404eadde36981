"""Measures what deciding costs: plan and commit for many running sequences, alone, beside a long queue, and beside
ten thousand requests for a thousand adapters with every policy on.

python benchmarks/scheduler_cost.py [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.messages import AdapterFetched, AdapterReady, AddAdapter
from rota.core.plan import StepPlan, StepResult
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.scheduler import Scheduler

RUNNING = 256
WAITING = 10_000
STEPS = 1000
STEP_S = 0.008

ADAPTERS = 1000
SLOTS = 32
IN_TURN = 40  # adapters whose requests run: more than there are slots, so they take turns
EACH = RUNNING // SLOTS


class Device:
    """Takes plans and says when copies are complete; the time it is asked for is not measured."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now = 0.0

    def step(self) -> tuple[StepPlan, float]:
        """One step, and the seconds that deciding took."""
        self.now += STEP_S
        started_at = time.perf_counter()
        plan = self._scheduler.plan(self.now)
        planned_at = time.perf_counter()
        result = StepResult(at=self.now, tokens=(7,) * len(plan.sampled_rows))
        committing_at = time.perf_counter()
        self._scheduler.commit(plan, result)
        committed_at = time.perf_counter()
        for adapter in plan.fetches:
            self._scheduler.apply(AdapterFetched(adapter_id=adapter.adapter_id, at=self.now))
        for load in plan.loads:
            self._scheduler.apply(AdapterReady(load.adapter_id, self.now))
        return plan, committed_at - committing_at + planned_at - started_at


def submit(number: int, adapter: AdapterId = BASE) -> Request:
    sampling = SamplingParams(max_new_tokens=100_000, stop_token_ids=frozenset({2}))
    tokens = tuple(number * 31 % 997 + i for i in range(200))
    return Request(
        request_id=RequestId(f"cmpl-{number:08d}"),
        prompt=tokens,
        sampling=sampling,
        arrived_at=number * 1e-6,
        adapter_id=adapter,
    )


def base_only(waiting: int) -> list[float]:
    """Steady decoding of `RUNNING` sequences while `waiting` others cannot sit down."""
    capacity = Capacity(blocks=RUNNING * 200, block_size=16, rows=RUNNING, max_sequence_tokens=8192)
    scheduler = Scheduler(SchedulerConfig(max_queued_requests=max(waiting, RUNNING)), capacity)
    device = Device(scheduler)
    for number in range(RUNNING):
        scheduler.apply(submit(number))
    while len(device.step()[0].decodes) < RUNNING:
        pass
    for number in range(waiting):
        scheduler.apply(submit(RUNNING + number))
    return [device.step()[1] for _ in range(STEPS)]


def every_policy() -> list[float]:
    """As many decode in each step, in turns with others that are parked, while thousands wait for any adapter."""
    rows = IN_TURN * EACH
    capacity = Capacity(blocks=rows * 200, block_size=16, rows=rows, max_sequence_tokens=8192, slots=SLOTS)
    policy = PolicyConfig(lora_policy="rotate", enable_prefill_delayer=True, prefill_delayer_queue_min_ratio=0.3)
    scheduler = Scheduler(SchedulerConfig(), capacity, policy, LoraConfig(max_loaded_loras=ADAPTERS))
    device = Device(scheduler)
    for number in range(1, ADAPTERS + 1):
        scheduler.apply(
            AddAdapter(adapter=Adapter(adapter_id=AdapterId(number), name=f"adapter{number}", path=""), at=0.0)
        )
    device.step()
    for number in range(rows):
        scheduler.apply(submit(number, AdapterId(1 + number % IN_TURN)))
    for _ in range(STEPS):
        device.step()
    for number in range(WAITING):
        scheduler.apply(submit(rows + number, AdapterId(1 + number % ADAPTERS)))
    taken = []
    for _ in range(STEPS):
        plan, seconds = device.step()
        assert plan.decodes
        taken.append(seconds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args()
    gc.freeze()
    cases = {"waiting_0": base_only(0), f"waiting_{WAITING}": base_only(WAITING), "every_policy": every_policy()}
    results = {
        name: {
            "running": RUNNING,
            "median_us": round(statistics.median(taken) * 1e6, 1),
            "p99_us": round(statistics.quantiles(taken, n=100)[98] * 1e6, 1),
        }
        for name, taken in cases.items()
    }
    for name, numbers in results.items():
        print(f"{name:16} median {numbers['median_us']:7.1f} µs   p99 {numbers['p99_us']:7.1f} µs")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
