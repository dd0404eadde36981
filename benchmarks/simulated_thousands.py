"""Runs fleets of 8, 64 and 512 replicas with 10,000 adapters in the simulator, and writes how their figures grow.

python benchmarks/simulated_thousands.py [--only 8 64 …] [--seeds 701 702] [--output FOLDER]

A run adds its figures to those that the folder has. 512 replicas take five minutes of a core.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path
from typing import Any

from policies.thousands import ADAPTERS, LASTS_S, RATE_PER_S, SHAPES, WARMS_S, run

from rota.observe.table import seconds

PAGE = Path("2026-11-16-simulated-thousands")
COMMAND = "python benchmarks/simulated_thousands.py --output benchmarks/results"
MACHINE = "2 ARM cores (Neoverse-N1), Python 3.11, beside other work"
NAMES = ("replicas", "fronts", "balancer", "seed")  # of a run
HEADS = [
    "replicas", "fronts", "balancer", "seed", "requests", "loads per 1,000", "reads per 1,000", "TTFT median", "P99",
    "E2E median", "P99", "busiest replica", "a choice", "P99", "a step noted", "router, cores",
]  # fmt: skip


def row(one: dict[str, Any]) -> list[str]:
    share = one["requests_each"]
    return [
        str(one["replicas"]),
        str(one["fronts"]),
        one["balancer"] or "",
        str(one["seed"]),
        f"{one['requests']:,}",
        *(f"{1000 * one[name] / one['requests']:.0f}" for name in ("loads", "reads")),
        *(seconds(one[name][figure]) for name in ("ttft_s", "e2e_s") for figure in ("median", "p99")),
        f"{share['max'] / share['mean']:.2f} ×",
        *(f"{one[name]:.0f} µs" for name in ("route_us", "route_p99_us", "note_us")),
        f"{one['router_share']:.2f}",
    ]


def page(found: list[dict[str, Any]]) -> str:
    lines = [HEADS, ["---"] * len(HEADS), *map(row, found)]
    return "\n\n".join(
        [
            "# Thousands of devices in the simulator",
            f"`{COMMAND}`, 2026-11-16, {MACHINE}. Times of requests are simulated, those of the router are the "
            "processor's.",
            f"`many-adapters` with {ADAPTERS:,} adapters, {RATE_PER_S:g} requests a second for each replica, over "
            f"{LASTS_S:g} virtual seconds, h200-llama8b. Times are of requests that came after the first {WARMS_S:g} "
            "seconds, in which adapters are read for the first time; loads and reads are of the whole run. Replicas "
            "hear of an adapter with the first request for it. A row is one seed. *Router, cores*: processor seconds "
            "of the router, its choices and what it notes, by the virtual seconds of the run.",
            "\n".join(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def keep(one: dict[str, Any], folder: Path) -> None:
    """Add a run to the folder's; several programs may do so at the same time."""
    path = (folder / PAGE).with_suffix(".json")
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or '{"runs": []}')["runs"]
        others = [other for other in before if any(other[name] != one[name] for name in NAMES)]
        runs = sorted([*others, one], key=lambda run: [str(run[name]).rjust(9) for name in NAMES])
        file.truncate(0)
        file.write(json.dumps({"command": COMMAND, "machine": MACHINE, "date": "2026-11-16", "runs": runs}, indent=1))
        file.write("\n")
        path.with_suffix(".md").write_text(page(runs) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=[*SHAPES], help="run only these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[701])
    parser.add_argument("--output", type=Path, help=f"add the figures to {PAGE}.json there, and write {PAGE}.md")
    options = parser.parse_args()
    for name in options.only:
        for seed in options.seeds:
            one = run(SHAPES[name], seed)
            print(f"{name}, seed {seed}: {one}", flush=True)
            if options.output:
                keep(one, options.output)


if __name__ == "__main__":
    main()
