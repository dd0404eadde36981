"""A plot of a run shows each request's time to first token and the longest pause in its answer."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from rota.bench.run import BenchRun
from rota.observe.picture import colours_of, draw_first_tokens, draw_times, name_colours, save


def plot(run: BenchRun, name: str, path: Path) -> None:
    """Write a picture file. The file's ending gives its kind (.png, .svg, .pdf, .html)."""
    colours = colours_of(run.recorder)
    figure = Figure(figsize=(8.0, 6.3), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_first_tokens(above, name, run.recorder, colours, run.started_at)
    above.set_ylabel("time to first token")
    paused = [one for one in run.recorder.records.values() if one.worst_gap_s]
    draw_times(below, paused, [one.worst_gap_s for one in paused], colours, run.started_at)
    below.set_ylabel("worst pause of an answer")
    below.set_xlabel("seconds")
    name_colours(figure, colours, run.workload.name_of)
    save(figure, run.workload.title, path)
