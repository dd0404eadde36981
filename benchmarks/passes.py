"""Measures what a pass costs under loads that could make it long, with this code and with the code of another checkout.

    python benchmarks/passes.py [--base FOLDER] [--only TEXT] [--repeats N] [--output FILE]

Each shape of load is run several times. A run is the same to the bit, so of each pass the shortest time counts: what
other processes on the machine add is left out. The loop also applies messages. Most take as long as one request does,
and a few as long as all that they are about; the last rows say how long.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from pass_shapes import shapes
from pass_stage import Ask, Stage

from rota.core.messages import AbortAll
from rota.core.policy_config import PolicyConfig
from rota.runtime.lifeline import tied

STEPS = 200
MOST_MS = 0.5

Times = dict[str, float]


def passes_of(name: str, repeats: int) -> Times:
    """Milliseconds of a core that a plan takes."""
    runs = []
    for _ in range(repeats):
        stage = shapes()[name](1.0)
        gc.collect()
        gc.disable()
        runs.append(stage.timed(STEPS))
        gc.enable()
    shortest = sorted(min(times) * 1000 for times in zip(*runs, strict=True))
    return {
        "median_ms": round(shortest[STEPS // 2], 3),
        "p99_ms": round(shortest[STEPS * 99 // 100 - 1], 3),
        "max_ms": round(shortest[-1], 3),
    }


def message_of(_name: str, repeats: int) -> Times:
    """Milliseconds of a core until 10,000 requests are called off by one message."""
    taken = []
    for _ in range(repeats):
        stage = Stage.of(PolicyConfig())
        for _ in range(10_000):
            stage.ask(Ask())
        started_at = time.thread_time()
        stage.scheduler.apply(AbortAll(stage.now))
        taken.append((time.thread_time() - started_at) * 1000)
    return {"median_ms": round(min(taken), 3), "p99_ms": round(min(taken), 3), "max_ms": round(min(taken), 3)}


MESSAGES = {"message: 10,000 requests called off at once": message_of}


def measured(name: str, repeats: int, folder: Path) -> Times:
    """In a process of its own, with the package of a checkout."""
    command = [sys.executable, __file__, "--one", name, "--repeats", str(repeats)]
    paths = {**os.environ, "PYTHONPATH": str(folder / "src")}
    answer = subprocess.run(tied(command), env=paths, stdout=subprocess.PIPE, check=True)
    times: Times = json.loads(answer.stdout)
    return times


def machine() -> str:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return f"{os.cpu_count()} cores, {model.partition(': ')[2]}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a checkout that is measured beside this one")
    parser.add_argument("--only", default="", help="only shapes whose name has this text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure = MESSAGES.get(options.one, passes_of)
        print(json.dumps(measure(options.one, options.repeats)))
        return
    sides = {"base": options.base} if options.base else {}
    sides["this"] = Path(__file__).parents[1]
    found: dict[str, dict[str, Times]] = {}
    for name in [*shapes(), *MESSAGES]:
        if options.only in name:
            found[name] = {side: measured(name, options.repeats, folder) for side, folder in sides.items()}
            row = "   ".join(
                "{median_ms:8.3f} {p99_ms:8.3f} {max_ms:8.3f}".format(**one) for one in found[name].values()
            )
            print(f"{name:58} {row}", flush=True)
    over = [name for name, one in found.items() if name in shapes() and one["this"]["p99_ms"] > MOST_MS]
    print(f"P99 over {MOST_MS} ms: {', '.join(over) or 'none'}")
    if options.output:
        load = [round(one, 1) for one in os.getloadavg()]
        told = {"date": str(date.today()), "machine": machine(), "load": load, "repeats": options.repeats, "ms": found}
        options.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
