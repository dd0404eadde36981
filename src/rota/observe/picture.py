"""A picture of a run has a dot for each first token and a colour for each adapter, and is saved as a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rota.core.errors import ConfigError
from rota.core.ids import BASE, AdapterId
from rota.observe.summary import Recorder, RequestRecord
from rota.observe.table import seconds

BASE_COLOUR = "#9a9a9a"
MOST_NAMED = 16  # adapters that a legend can tell apart

Colours = Mapping[AdapterId, Any]


def colours_of(*recorders: Recorder) -> Colours:
    adapters = sorted({record.adapter_id for recorder in recorders for record in recorder.records.values()})
    named = [adapter for adapter in adapters if adapter != BASE]
    palette = colormaps["tab10"] if len(named) <= 10 else colormaps["turbo"].resampled(len(named))
    colours: dict[AdapterId, Any] = {BASE: BASE_COLOUR} if BASE in adapters else {}
    return colours | {adapter: palette(index) for index, adapter in enumerate(named)}


def draw_first_tokens(axes: Axes, name: str, recorder: Recorder, colours: Colours, starts_at: float) -> None:
    """A dot for each request: when it arrived, and its time to first token; higher is worse."""
    served = [one for one in recorder.records.values() if one.tokens]
    waits = [one.first_at - one.asked_at for one in served]
    draw_times(axes, served, waits, colours, starts_at)
    summary = recorder.summary()
    p99 = summary["ttft_s"]["p99"]
    axes.axhline(p99, color="black", linewidth=0.8, linestyle=":")
    told = f"99 of 100 within {seconds(p99)}, {summary['output_tokens_per_s']:,.0f} tokens/s"
    axes.set_title(f"{name}: {told}", fontsize=11)


def draw_times(
    axes: Axes, records: Sequence[RequestRecord], times: Sequence[float], colours: Colours, starts_at: float
) -> None:
    """A dot for each request: when it arrived, and a time of it."""
    asked = [one.asked_at - starts_at for one in records]
    axes.scatter(asked, times, s=14, c=[colours[one.adapter_id] for one in records], linewidths=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.grid(axis="y", linewidth=0.3)


def name_colours(figure: Figure, colours: Colours, name_of: Callable[[AdapterId], str]) -> None:
    """A legend below, unless there is only one colour or more than a reader can tell apart."""
    if 1 < len(colours) <= MOST_NAMED:
        dots = [Line2D([], [], color=colour, marker="o", linestyle="") for colour in colours.values()]
        names = [name_of(adapter) for adapter in colours]
        figure.legend(dots, names, loc="outside lower center", ncols=min(9, len(names)), frameon=False)


def save(figure: Figure, title: str, path: Path) -> None:
    """Write a picture file; its suffix says the format (.png, .svg, .pdf, .html)."""
    figure.suptitle(title)
    try:
        if path.suffix == ".html":
            path.write_text(_page(figure, title), "utf-8")
        else:
            figure.savefig(path, dpi=80)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot write the plot {path}: {error}.") from error


def _page(figure: Figure, title: str) -> str:
    """The picture as an HTML page that needs no other file."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    return f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>\n{svg[svg.index("<svg") :]}'
