"""The report of a run has the simulator's summary and the errors, as a dictionary and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from rota.bench.run import BenchRun
from rota.observe.picture import Colours, colours_of, draw_first_tokens, name_colours, save
from rota.observe.summary import Recorder, spread
from rota.observe.table import print_table, seconds

MOST_PROBLEMS = 10


def report(run: BenchRun) -> dict[str, Any]:
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


# ── plot ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# A plot of a run shows each request's time to first token and the longest pause in its answer.


def plot(run: BenchRun, name: str, path: Path) -> None:
    """Write a picture file. The file's ending gives its kind (.png, .svg, .pdf, .html)."""
    colours = colours_of(run.recorder)
    figure = Figure(figsize=(8.0, 6.3), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_first_tokens(above, name, run.recorder, colours, run.started_at)
    above.set_ylabel("time to first token")
    _draw_pauses(below, run.recorder, colours, run.started_at)
    below.set_xlabel("seconds")
    name_colours(figure, colours, run.workload.name_of)
    save(figure, run.workload.title, path)


def _draw_pauses(axes: Axes, recorder: Recorder, colours: Colours, starts_at: float) -> None:
    paused = [one for one in recorder.records.values() if one.worst_gap_s]
    asked = [one.asked_at - starts_at for one in paused]
    worst = [one.worst_gap_s for one in paused]
    axes.scatter(asked, worst, s=14, c=[colours[one.adapter_id] for one in paused], linewidths=0)
    axes.set_ylabel("worst pause of an answer")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.grid(axis="y", linewidth=0.3)
