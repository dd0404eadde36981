"""Traffic meters count the requests of each target of a route, roll-backs, and copies for shadows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.core.adapter import OTHER_LABEL
from rota.observe.meters import LATENCIES, Histogram, count
from rota.observe.places import Places

MOST_TARGETS = 50
# Names and targets are printable, so none contains it.
_BETWEEN = "\0"


@dataclass(slots=True)
class TargetMeters:
    """The numbers of the requests that a route sent to one target, or of all targets without meters of their own."""

    label: str
    open: int = 0  # requests that have not ended
    used_at: float = -math.inf
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str]:
        """The routed name and its target."""
        name, _, target = self.label.partition(_BETWEEN)
        return (name, target) if target else (OTHER_LABEL, OTHER_LABEL)


class TrafficMeters:
    """Plain numbers that only the event loop changes."""

    def __init__(self, most_targets: int = MOST_TARGETS) -> None:
        self._targets = Places(most_targets, TargetMeters)
        self._most_targets = most_targets
        self._weights: dict[str, Mapping[str, float]] = {}
        self.rollbacks: dict[str, int] = {}  # by cause
        self.shadows: dict[str, int] = {}  # by outcome

    @property
    def targets(self) -> list[TargetMeters]:
        return self._targets.shown

    @property
    def weights(self) -> list[tuple[tuple[str, str], float]]:
        """The first targets of all routes, by name and target."""
        found = [((name, one), weight) for name, split in self._weights.items() for one, weight in split.items()]
        return found[: self._most_targets]

    def asked(self, name: str, target: str, at: float) -> TargetMeters:
        meters = self._targets.take(f"{name}{_BETWEEN}{target}", at)
        meters.open += 1
        return meters

    def ended(self, meters: TargetMeters, outcome: str, ttft_s: float | None, at: float) -> None:
        meters.open -= 1
        self._targets.touch(meters, at)
        count(meters.outcomes, outcome)
        if ttft_s is not None:
            meters.ttft.add(ttft_s)

    def weigh(self, name: str, weights: Mapping[str, float]) -> None:
        """The weights of a name's targets; empty: the name has no route."""
        self._weights.pop(name, None)
        if weights:
            self._weights[name] = weights

    def rolled_back(self, cause: str) -> None:
        count(self.rollbacks, cause)

    def shadowed(self, outcome: str) -> None:
        count(self.shadows, outcome)
