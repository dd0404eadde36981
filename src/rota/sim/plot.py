"""A plot shows policies side by side: how long first tokens took, and which adapter held which slot when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rota.core.events import Event, SlotChanged, SlotState
from rota.core.ids import AdapterId, EngineId, RequestId, Slot
from rota.observe.picture import Colours, colours_of, draw_first_tokens, name_colours, save
from rota.observe.summary import Recorder
from rota.sim.run import STARTS_AT, adapter_name

# ── tenures ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Tenures say which adapter was in which slot, being copied there or ready to run, and when.


@dataclass(slots=True)
class Tenures:
    """Follows the changes of slots; `closed` has the tenures that are over: what began each, and until when it was."""

    closed: list[tuple[SlotChanged, float]] = field(default_factory=list)
    last_at: float = 0.0
    _open: dict[tuple[EngineId, Slot], SlotChanged] = field(default_factory=dict)

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        """A request that only waits holds no slot."""

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            self.last_at = event.at
            if isinstance(event, SlotChanged):
                self._end(event, event.at)
                if event.state is not SlotState.EMPTY:
                    self._open[event.engine_id, event.slot] = event

    def close(self) -> None:
        """The run is over: every adapter that is in a slot was there until the end."""
        for begun in list(self._open.values()):
            self._end(begun, self.last_at)

    def _end(self, change: SlotChanged, at: float) -> None:
        """The tenure in the slot that changes is over."""
        begun = self._open.pop((change.engine_id, change.slot), None)
        if begun and at > begun.at:
            self.closed.append((begun, at))


# ── pictures ────────────────────────────────────────────────────────────────────────────────────────────────────────
# A picture has two rows for each policy: first tokens, and slots.


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn of one policy's run."""

    recorder: Recorder
    tenures: Tenures
    starts_at: float = STARTS_AT


def plot(pictures: Mapping[str, Picture], title: str, path: Path) -> None:
    """Write a picture file; its ending says of what kind (.png, .svg, .pdf, .html)."""
    colours = colours_of(*(picture.recorder for picture in pictures.values()))
    has_slots = any(picture.tenures.closed for picture in pictures.values())
    heights = (3, 2) if has_slots else (3,)
    figure = Figure(figsize=(1.0 + 4.6 * len(pictures), 1.3 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), len(pictures), sharex=True, sharey="row", squeeze=False, height_ratios=heights)
    for column, (name, picture) in enumerate(pictures.items()):
        draw_first_tokens(axes[0][column], name, picture.recorder, colours, picture.starts_at)
        if has_slots:
            _draw_slots(axes[1][column], picture, colours)
        axes[-1][column].set_xlabel("seconds")
    for left, label in zip(axes[:, 0], ("time to first token", "place on the device"), strict=False):
        left.set_ylabel(label)
    name_colours(figure, colours, adapter_name)
    save(figure, title, path)


def _draw_slots(axes: Axes, picture: Picture, colours: Colours) -> None:
    """A bar while an adapter is in a slot; the bar is pale while the adapter is being copied there."""
    spans: dict[tuple[int, AdapterId, bool], list[tuple[float, float]]] = {}
    slots = max((begun.slot for begun, _ in picture.tenures.closed), default=0) + 1  # of each replica
    for begun, until in picture.tenures.closed:
        place, is_ready = begun.engine_id * slots + begun.slot, begun.state is SlotState.READY
        span = (begun.at - picture.starts_at, until - begun.at)
        spans.setdefault((place, begun.adapter_id, is_ready), []).append(span)
    for (place, adapter, is_ready), bars in spans.items():
        axes.broken_barh(bars, (place + 0.6, 0.8), color=colours.get(adapter), alpha=1.0 if is_ready else 0.3)
    places = max((place for place, _, _ in spans), default=0) + 1
    axes.set_ylim(places + 0.5, 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
