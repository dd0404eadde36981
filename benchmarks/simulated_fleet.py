"""Runs what is asked of several replicas in the simulator, and says what holds.

python benchmarks/simulated_fleet.py [--only NAME …] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from policies.fleet import carried, neighbours, routers
from policies.fleet_ranks import ranks
from policies.report import Report
from policies.target import Section

SECTIONS: dict[str, Callable[[], Section]] = {
    "routers": routers,
    "carried": carried,
    "neighbours": neighbours,
    "ranks": ranks,
}


REPORT = Report(
    title="Several replicas in the simulator",
    command="python benchmarks/simulated_fleet.py --output benchmarks/results",
    date="2026-11-16",
    machine="2 ARM cores (Neoverse-N1), Python 3.11",
    explained_in="docs/simulator.md",
    page=Path("2026-11-16-simulated-fleet"),
    sections=SECTIONS,
)

if __name__ == "__main__":
    REPORT.main(__doc__)
