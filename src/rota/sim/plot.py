"""A plot shows policies side by side: how long first tokens took, and which adapter held which place when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rota.core.ids import AdapterId
from rota.observe.picture import Colours, colours_of, draw_first_tokens, name_colours, save
from rota.observe.summary import Recorder
from rota.sim.run import STARTS_AT, adapter_name
from rota.sim.tenures import Tenures


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn of one policy's run."""

    recorder: Recorder
    tenures: Tenures
    starts_at: float = STARTS_AT


def plot(pictures: Mapping[str, Picture], title: str, path: Path) -> None:
    """Write a picture file; its ending says of what kind (.png, .svg, .pdf, .html)."""
    colours = colours_of(*(picture.recorder for picture in pictures.values()))
    has_places = any(picture.tenures.closed for picture in pictures.values())
    heights = (3, 2) if has_places else (3,)
    figure = Figure(figsize=(1.0 + 4.6 * len(pictures), 1.3 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), len(pictures), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    for column, (name, picture) in enumerate(pictures.items()):
        draw_first_tokens(axes[0][column], name, picture.recorder, colours, picture.starts_at)
        if has_places:
            _draw_places(axes[1][column], picture, colours)
        axes[-1][column].set_xlabel("seconds")
    for left, label in zip(axes[:, 0], ("time to first token", "place on the device"), strict=False):
        left.set_ylabel(label)
    name_colours(figure, colours, adapter_name)
    save(figure, title, path)


def _draw_places(axes: Axes, picture: Picture, colours: Colours) -> None:
    """A bar while an adapter is in a place; the bar is pale while the adapter is being copied there."""
    spans: dict[tuple[int, AdapterId, bool], list[tuple[float, float]]] = {}
    slots = max((one.place for one in picture.tenures.closed), default=0) + 1  # of each replica
    for one in picture.tenures.closed:
        spans.setdefault((one.engine_id * slots + one.place, one.adapter_id, one.is_ready), []).append(
            (one.since - picture.starts_at, one.until - one.since)
        )
    for (place, adapter, is_ready), bars in spans.items():
        axes.broken_barh(bars, (place + 0.6, 0.8), color=colours.get(adapter), alpha=1.0 if is_ready else 0.3)
    places = max((place for place, _, _ in spans), default=0) + 1
    axes.set_ylim(places + 0.5, 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
