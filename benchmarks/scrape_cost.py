"""Measures what scrapes cost at a thousand adapters that all have waiting requests, twenty times a second: how long an
answer takes, how long the engine's loop is held, and how long the event loop is held at a stretch.

python benchmarks/scrape_cost.py [--duration 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from scheduler_cost import ADAPTERS, RUNNING, SLOTS, Device, submit

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event, Finished, FinishReason, Inspected, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AddAdapter, Inspect, Message
from rota.core.plan import StepResult
from rota.observe.metrics import Metrics
from rota.runtime.service import ServicePhase, ServiceState
from rota.scheduler import Scheduler
from rota.server.metrics import Scrapes
from rota.server.queries import Queries

SCRAPES_PER_S = 20
WAITING = 4 * ADAPTERS
KEYS = 60  # ten more than have series of their own
CAPACITY = Capacity(blocks=RUNNING * 200, block_size=16, rows=RUNNING, max_sequence_tokens=8192, slots=SLOTS)
BEAT_S = 0.001
COUNTED = 200


class Engine:
    """A service whose engine answers at once, from a scheduler with thousands of requests."""

    state = ServiceState(phase=ServicePhase.READY, capacity=CAPACITY)

    def __init__(self, metrics: Metrics) -> None:
        config, lora = SchedulerConfig(max_queued_requests=2 * WAITING), LoraConfig(max_loaded_loras=ADAPTERS)
        self.scheduler = Scheduler(config, CAPACITY, lora=lora)
        self.device = Device(self.scheduler)
        for number in range(1, ADAPTERS + 1):
            name = f"adapter{number}"
            self.scheduler.apply(AddAdapter(adapter=Adapter(adapter_id=AdapterId(number), name=name, path=""), at=0.0))
        self.device.step()
        for number in range(WAITING):
            self.scheduler.apply(submit(number, AdapterId(1 + number % ADAPTERS)))
        for _ in range(50):
            metrics.observe(self.step())
        self.held_s: list[float] = []
        self.answer = self.count(metrics)
        self.hear: Callable[[list[Event]], None] = lambda _: None

    def count(self, metrics: Metrics) -> Inspected:
        """What the engine answers, measured often: in a server another process does that."""
        for _ in range(COUNTED):
            began_at = time.perf_counter()
            self.scheduler.apply(Inspect(0.0, metrics.with_places()))
            self.held_s.append(time.perf_counter() - began_at)
        return next(one for one in self.step() if isinstance(one, Inspected))

    def step(self) -> list[Event]:
        self.device.now += 0.01
        plan = self.scheduler.plan(self.device.now)
        result = StepResult(at=self.device.now, tokens=(7,) * len(plan.sampled_rows))
        return self.scheduler.commit(plan, result)

    def send(self, message: Message) -> None:
        assert isinstance(message, Inspect)
        asyncio.get_running_loop().call_soon(self.hear, [replace(self.answer, at=message.at)])


def busy_metrics() -> Metrics:
    """Meters as after a busy hour: every adapter and many keys have had requests."""
    metrics = Metrics(lambda adapter: f"adapter{adapter}")
    for number in range(1, ADAPTERS + 1):
        request_id = RequestId(f"r{number}")
        metrics.asked(request_id, AdapterId(number), 0.0)
        metrics.owned([request_id], f"key{number % KEYS}", "call", f"key{number % KEYS}")
        metrics.observe([Produced(at=0.1 * step, request_ids=(request_id,), tokens=(7,)) for step in range(5)])
        metrics.observe([Finished(request_id=request_id, at=1.0, reason=FinishReason.STOP, output_tokens=5)])
    return metrics


def serve_some(metrics: Metrics, number: int) -> None:
    """Between two scrapes as many adapters as have slots produce tokens."""
    for adapter in range(1, SLOTS + 1):
        request_id = RequestId(f"s{number}-{adapter}")
        metrics.asked(request_id, AdapterId(adapter), float(number))
        metrics.observe([Produced(at=number + 0.1 * step, request_ids=(request_id,), tokens=(7,)) for step in range(3)])


async def beat(gaps: list[float]) -> None:
    """How much later than asked the event loop comes back: what a token that has come would wait."""
    while True:
        began_at = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        gaps.append(time.perf_counter() - began_at - BEAT_S)


async def turns(held: list[float]) -> None:
    """The processor time of others between two turns of this task: what a token would wait on a machine at rest."""
    while True:
        began_at = time.thread_time()
        await asyncio.sleep(0)
        held.append(time.thread_time() - began_at)


async def longest_stretch(scrapes: Scrapes) -> float:
    held: list[float] = []
    turning = asyncio.create_task(turns(held))
    await asyncio.sleep(0)
    await scrapes.answer()
    turning.cancel()
    return max(held)


async def measure(duration_s: float) -> dict[str, Any]:
    metrics = busy_metrics()
    engine = Engine(metrics)
    queries = Queries(cast(Any, engine))
    engine.hear = queries.observe
    scrapes = Scrapes(metrics, cast(Any, engine), queries, for_picker=True)
    size = len((await scrapes.answer()).body)
    gc.collect()
    gc.freeze()
    idle = await gaps_during(asyncio.sleep(duration_s))
    answers: list[float] = []
    worked: list[float] = []

    async def scrape() -> None:
        for number in range(round(duration_s * SCRAPES_PER_S)):
            serve_some(metrics, number)
            began_at, began_work_at = time.perf_counter(), time.thread_time()
            await scrapes.answer()
            answers.append(time.perf_counter() - began_at)
            worked.append(time.thread_time() - began_work_at)
            await asyncio.sleep(max(0.0, 1 / SCRAPES_PER_S - answers[-1]))

    scraped = await gaps_during(scrape())
    stretches = [await longest_stretch(scrapes) for _ in range(COUNTED)]
    return {
        "adapters": ADAPTERS,
        "bytes": size,
        "answer_ms": spread(answers),
        "answer_processor_ms": spread(worked),
        "longest_stretch_processor_ms": spread(stretches),
        "engine_held_ms": spread(engine.held_s),
        "loop_held_idle_ms": spread(idle),
        "loop_held_scraped_ms": spread(scraped),
    }


async def gaps_during(work: Any) -> list[float]:
    gaps: list[float] = []
    beating = asyncio.create_task(beat(gaps))
    await work
    beating.cancel()
    return gaps


def spread(taken: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(taken, n=100)
    return {
        "median": round(statistics.median(taken) * 1e3, 3),
        "p99": round(cuts[98] * 1e3, 3),
        "max": round(max(taken) * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=5.0)
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args()
    results = asyncio.run(measure(options.duration))
    for name, value in results.items():
        print(f"{name:24} {value}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
