"""Half of all clients leave at a random moment while adapters come and go, for half an hour: does anything leak?

    python benchmarks/cancel_storm.py [--scenario FILE] [--output FILE]

The built-in model on the CPU, `rota serve` and `rota bench` in processes of their own. In the end nobody may be lost,
nothing may have failed, no request, KV block or load may be left, and memory must be where it was after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from front.serving import Served, started

from rota.bench.config import BenchConfig
from rota.bench.run import BenchRun, bench
from rota.workload.scenario import read_scenario

SCENARIO = Path(__file__).parent / "scenarios" / "cancel-storm-cpu.toml"
LOOK_EVERY_S = 10.0
# The first part of a run fills caches that stay; the rest is compared with what they grew to.
WARM_UP_SHARE = 0.2
MOST_GROWTH = 0.05
LEFT_OVER = ("rota_requests_waiting", "rota_requests_running", "rota_requests_parked", "rota_kv_blocks_used")


@dataclass(slots=True)
class Memory:
    """What the server's processes hold, from time to time."""

    served: Served
    samples: list[dict[str, float]] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            self.samples.append(self.served.rss_mb())
            await asyncio.sleep(LOOK_EVERY_S)

    def growth(self) -> float:
        """How much more is held at the end than after the warm-up: medians over a tenth of the run each."""
        totals = [sum(sample.values()) for sample in self.samples]
        tenth, warm = max(1, len(totals) // 10), int(len(totals) * WARM_UP_SHARE)
        return statistics.median(totals[-tenth:]) / statistics.median(totals[warm : warm + tenth]) - 1.0


async def storm(served: Served, scenario: Path) -> tuple[BenchRun, Memory]:
    memory = Memory(served)
    watching = asyncio.create_task(memory.watch())
    run = await bench(BenchConfig(base_url=served.url, scenario=str(scenario)), lambda _: lambda: None)
    watching.cancel()
    return run, memory


def metrics(url: str) -> dict[str, float]:
    """The sum over every metric's series."""
    sums: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def measure(scenario: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from rota.cli import main; main()", "serve", "--quiet", "--port", "0"]
    # Few blocks: a cache that is not yet used up would look like memory that grows.
    options = ["--max-loras-per-batch", "3", "--kv-blocks", "512", "--log-level", "error"]
    with started([*command, *options]) as served:
        began_at = time.monotonic()
        run, memory = asyncio.run(storm(served, scenario))
        took_s = time.monotonic() - began_at
        time.sleep(2.0)  # for the last ones to be called off
        found = metrics(served.url)
    summary = run.recorder.summary()
    asked = read_scenario(scenario)
    return {
        "minutes": round(took_s / 60.0, 1),
        "asked": sum(clients.requests for clients in asked.clients) + asked.transients,
        "requests": summary["requests"],
        "left": summary["left"],
        "failed": summary["failed"],
        "problems": dict(run.problems),
        "left_over": {name: found[name] for name in LEFT_OVER},
        "restarts": found.get("rota_engine_restarts_total", 0.0),
        "rotations": int(found["rota_rotations_total"]),
        "loads": int(found["rota_adapter_loads_total"]),
        "memory_growth": round(memory.growth(), 4),
        "rss_mb": memory.samples[:: max(1, len(memory.samples) // 30)],
        "ttft_s": summary["ttft_s"],
    }


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    return {
        "nobody is lost": found["requests"] == found["asked"],
        "nothing failed": not found["failed"] and not found["problems"],
        "no engine died": not found["restarts"],
        "nothing is left over": not any(found["left_over"].values()),
        f"memory grew by at most {MOST_GROWTH:.0%}": found["memory_growth"] <= MOST_GROWTH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", type=Path, default=SCENARIO)
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    options = parser.parse_args()
    found = measure(options.scenario)
    held = verdicts(found)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f}"
    found = {"date": str(date.today()), "machine": machine, "held": held, **found}
    print(json.dumps({name: value for name, value in found.items() if name != "rss_mb"}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    main()
