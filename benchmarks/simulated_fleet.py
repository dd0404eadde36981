"""Runs what is asked of several replicas in the simulator, and says what holds.

python benchmarks/simulated_fleet.py [--only NAME …] [--output FILE.md]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from policies.fleet import carried, neighbours, routers
from policies.fleet_ranks import ranks
from policies.target import Section
from simulated_policies import print_targets
from tqdm import tqdm

DATE = "2026-11-16"
MACHINE = "2 ARM cores (Neoverse-N1), Python 3.11"

SECTIONS: dict[str, Callable[[], Section]] = {
    "routers": routers,
    "carried": carried,
    "neighbours": neighbours,
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="run only these")
    parser.add_argument("--output", type=Path, help="write a Markdown file, and a JSON file beside it")
    options = parser.parse_args()
    sections, took_s = [], {}
    for name in tqdm(options.only, unit="section", disable=None):
        started_at = time.perf_counter()
        sections.append(SECTIONS[name]())
        took_s[name] = round(time.perf_counter() - started_at, 1)
    print_targets(sections)
    if options.output:
        write(sections, took_s, options.output)


def write(sections: list[Section], took_s: dict[str, float], path: Path) -> None:
    command = f"python benchmarks/simulated_fleet.py --output {path}"
    found = {"command": command, "date": DATE, "machine": MACHINE, "took_s": took_s}
    content = {**found, "sections": [section.as_dict() for section in sections]}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    parts = [
        "# Several replicas in the simulator",
        f"`{command}`, {DATE}, {MACHINE}. Times are simulated; what each target means is in docs/simulator.md.",
        *(section.as_markdown() for section in sections),
    ]
    path.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
