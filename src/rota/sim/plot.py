"""A plot shows, for each policy side by side, how long first tokens took and who held which place when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from rota.core.errors import ConfigError
from rota.core.ids import BASE, AdapterId, Slot
from rota.observe.summary import Recorder
from rota.observe.table import seconds
from rota.sim.run import STARTS_AT, adapter_name
from rota.sim.tenures import Tenures

BASE_COLOUR = "#9a9a9a"
MOST_NAMED = 16  # adapters that a legend can tell apart


@dataclass(frozen=True, slots=True)
class Picture:
    """What one policy's run left behind to be drawn."""

    recorder: Recorder
    tenures: Tenures


def plot(pictures: Mapping[str, Picture], title: str, path: Path) -> None:
    """Write a picture file; its ending says of what kind (.png, .svg, .pdf)."""
    adapters = sorted({one.adapter for picture in pictures.values() for one in picture.recorder.journeys.values()})
    colours = _colours(adapters)
    has_places = any(picture.tenures.closed for picture in pictures.values())
    heights = (3, 2) if has_places else (3,)
    figure = Figure(figsize=(1.0 + 4.6 * len(pictures), 1.3 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), len(pictures), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    for column, (name, picture) in enumerate(pictures.items()):
        _draw_first_tokens(axes[0][column], name, picture.recorder, colours)
        if has_places:
            _draw_places(axes[1][column], picture.tenures, colours)
        axes[-1][column].set_xlabel("seconds")
    axes[0][0].set_ylabel("time to first token")
    if has_places:
        axes[1][0].set_ylabel("place on the device")
    figure.suptitle(title)
    if 1 < len(adapters) <= MOST_NAMED:
        dots = [Line2D([], [], color=colour, marker="o", linestyle="") for colour in colours.values()]
        names = [adapter_name(adapter) for adapter in colours]
        figure.legend(dots, names, loc="outside lower center", ncols=min(9, len(names)), frameon=False)
    try:
        figure.savefig(path, dpi=80)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot write the plot {path}: {error}.") from error


def _colours(adapters: list[AdapterId]) -> dict[AdapterId, Any]:
    named = [adapter for adapter in adapters if adapter != BASE]
    palette = colormaps["tab10"] if len(named) <= 10 else colormaps["turbo"].resampled(len(named))
    colours: dict[AdapterId, Any] = {BASE: BASE_COLOUR} if BASE in adapters else {}
    return colours | {adapter: palette(index) for index, adapter in enumerate(named)}


def _draw_first_tokens(axes: Axes, name: str, recorder: Recorder, colours: Mapping[AdapterId, Any]) -> None:
    """A dot a request, when it was asked and how long it waited; higher is worse."""
    served = [one for one in recorder.journeys.values() if one.tokens]
    waits = [one.first_at - one.asked_at for one in served]
    asked = [one.asked_at - STARTS_AT for one in served]
    axes.scatter(asked, waits, s=14, c=[colours[one.adapter] for one in served], linewidths=0)
    summary = recorder.summary()
    p99 = summary["ttft_s"]["p99"]
    axes.axhline(p99, color="black", linewidth=0.8, linestyle=":")
    told = f"99 of 100 within {seconds(p99)}, {summary['output_tokens_per_s']:,.0f} tokens/s"
    axes.set_title(f"{name}: {told}", fontsize=11)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.grid(axis="y", linewidth=0.3)


def _draw_places(axes: Axes, tenures: Tenures, colours: Mapping[AdapterId, Any]) -> None:
    """A bar while an adapter is in a place, pale while it is still being copied there."""
    spans: dict[tuple[Slot, AdapterId, bool], list[tuple[float, float]]] = {}
    for one in tenures.closed:
        spans.setdefault((one.place, one.adapter, one.is_ready), []).append(
            (one.since - STARTS_AT, one.until - one.since)
        )
    for (place, adapter, is_ready), bars in spans.items():
        axes.broken_barh(bars, (place + 0.6, 0.8), color=colours.get(adapter), alpha=1.0 if is_ready else 0.3)
    places = max((place for place, _, _ in spans), default=0) + 1
    axes.set_ylim(places + 0.5, 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
