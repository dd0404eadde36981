"""The report of a run has the simulator's summary and the errors, as a dictionary and as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rota.bench.run import Run
from rota.observe.summary import spread
from rota.observe.table import print_table

MOST_PROBLEMS = 10


def report(run: Run) -> dict[str, Any]:
    """The simulator's summary, and the figures that only an HTTP client can measure."""
    return {
        **run.recorder.summary(run.workload.name_of),
        "late_s": spread(run.late_s),
        "problems": dict(run.problems.most_common()),
    }


def print_report(found: dict[str, Any], title: str) -> None:
    """Print one row for all requests, and one row per adapter if there are several."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    served = found["requests"] - found["failed"] - found["left"]
    left = f", {found['left']} left by their clients" if found["left"] else ""
    console.print(f"{title}: {served} answered, {found['failed']} failed{left}, in {found['duration_s']:.1f} s")
    print_table({"all requests": found, **(found["adapters"] if len(found["adapters"]) > 1 else {})})
    for problem, times in list(found["problems"].items())[:MOST_PROBLEMS]:
        console.print(f"{times} × {problem}")
