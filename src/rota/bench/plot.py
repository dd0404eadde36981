"""A plot of a run shows each request's time to first token and the longest pause in its answer."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rota.bench.run import BenchRun
from rota.observe.picture import Colours, colours_of, draw_first_tokens, name_colours, save
from rota.observe.summary import Recorder
from rota.observe.table import seconds


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
