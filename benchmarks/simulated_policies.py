"""Runs every target of the policies in the simulator, and says which hold.

python benchmarks/simulated_policies.py [--only NAME …] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from policies.crowd import many_adapters, overload
from policies.fidelity import fidelity
from policies.isolation import base_isolation
from policies.prefill import osl_variance
from policies.prefill_alone import delayer_report
from policies.runs import A100, H200
from policies.tail import tail_ttft
from policies.target import Section, Target
from policies.tenants import every_adapter_a_tenant, neighbours, neighbours_slots
from rich.console import Console
from rich.table import Table
from scheduler_cost import every_policy
from tqdm import tqdm

from rota.observe.summary import spread

DATE = "2026-11-16"
MACHINE = "2 cores, Python 3.11"


def deciding() -> Section:
    """The median, since other processes share the cores."""
    section = Section("Cost of deciding", "python benchmarks/scheduler_cost.py")
    micros = spread(every_policy())["median"] * 1e6
    what = "a step with every policy on, 256 running, 10,000 waiting for 1,000 adapters"
    section.targets.append(Target(what, "≤ 500 µs", f"{micros:.0f} µs", micros <= 500.0))
    return section


SECTIONS: dict[str, Callable[[], Section]] = {
    "fidelity": fidelity,
    "tail-ttft": partial(tail_ttft, 4.0),
    "tail-ttft-8": partial(tail_ttft, 8.0),
    "base-isolation": partial(base_isolation, H200),
    "base-isolation-a100": partial(base_isolation, A100),
    "osl-variance": osl_variance,
    "delayer-report": delayer_report,
    "many-adapters": many_adapters,
    "overload": overload,
    "neighbours": neighbours,
    "neighbours-slots": neighbours_slots,
    "every-adapter-a-tenant": every_adapter_a_tenant,
    "deciding": deciding,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="run only these")
    parser.add_argument("--output", type=Path, help="write simulated-policies.json and .md into this folder")
    options = parser.parse_args()
    sections, took_s = [], {}
    for name in tqdm(options.only, unit="section", disable=None):
        started_at = time.perf_counter()
        sections.append(SECTIONS[name]())
        took_s[name] = round(time.perf_counter() - started_at, 1)
    print_targets(sections)
    if options.output:
        write(sections, took_s, options.output)


def print_targets(sections: list[Section]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("target", "wanted", "measured", "held"):
        table.add_column(head)
    for section in sections:
        table.add_row(section.title, style="bold")
        for one in section.targets:
            table.add_row(f"  {one.what}", one.wanted, one.measured, "yes" if one.is_held else "no")
    Console(width=180, highlight=False).print(table)


def write(sections: list[Section], took_s: dict[str, float], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/simulated_policies.py --output benchmarks/results"
    found = {"command": command, "date": DATE, "machine": MACHINE, "took_s": took_s}
    content = {**found, "sections": [section.as_dict() for section in sections]}
    (folder / "simulated-policies.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    parts = [
        "# The policies in the simulator",
        f"`{command}`, {DATE}, {MACHINE}. Times are simulated; what each target means is in docs/policies.md.",
        *(section.as_markdown() for section in sections),
    ]
    (folder / "simulated-policies.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
