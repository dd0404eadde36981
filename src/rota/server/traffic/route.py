"""A route sends the requests of one name to several targets: by weight, and the same asker to the same one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from rota.core.adapter import Adapter
from rota.core.errors import RequestError

# ── split ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# A split chooses one of several targets for each request: by weight, and the same one for the same asker.

# A split of more targets would be a mistake, and each target has metrics of its own.
MOST_TARGETS = 16
# Thirds that are written with four digits do not sum to 1. With seven they do.
TOLERANCE = 1e-6
# What a hash can give: 8 bytes.
_HASHES = 2.0**64


class TrafficSplit:
    """Targets and their weights.

    An asker's target is that of the highest score, and a score depends on the asker, the target and its weight alone
    (weighted rendezvous). So every server gives an asker the same target, also after a restart, and after a change of
    weights an asker moves from one target to another only if the weight of the other has grown relative to the first.
    A request without an asker goes to the target that is furthest behind its weight, so that counts follow weights.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """The weights must have passed `check_weights`."""
        self.weights = dict(weights)
        self._counts = dict.fromkeys(self.weights, 0)
        self._served = {target: weight for target, weight in self.weights.items() if weight > 0.0}

    def choose(self, asker: str | None = None) -> str:
        """The target of a request. Without an asker, the request is counted."""
        return self._next() if asker is None else max(self._served, key=lambda target: self._score(target, asker))

    def _next(self) -> str:
        number = 1 + sum(self._counts.values())
        target = max(self._served, key=lambda one: self._served[one] * number - self._counts[one])
        self._counts[target] += 1
        return target

    def _score(self, target: str, asker: str) -> float:
        """The logarithm of a number that is drawn evenly from 0 to 1, divided by the weight."""
        drawn = int.from_bytes(blake2b(f"{target}\0{asker}".encode(), digest_size=8).digest(), "big")
        return math.log((drawn + 1) / (_HASHES + 1)) / self._served[target]


def check_weights(weights: Mapping[str, float], param: str = "targets") -> None:
    """Raises RequestError for weights that no split can have."""
    if not 1 <= len(weights) <= MOST_TARGETS:
        raise RequestError.bad_field(param, f"{param} must name 1 to {MOST_TARGETS} targets, not {len(weights)}.")
    for target, weight in weights.items():
        if not 0.0 <= weight <= 1.0:  # also refuses what is not a number
            message = f"{param}.{target[:200]}: a weight must be between 0 and 1, not {weight}."
            raise RequestError.bad_field(f"{param}.{target[:200]}", message)
    if abs(total := math.fsum(weights.values()) - 1.0) > TOLERANCE:
        raise RequestError.bad_field(param, f"The weights in {param} must sum to 1, not {total + 1.0:g}.")


# ── route ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Chosen:
    """The adapter of a request. If a route chose it: by which name, which target, and who gets a copy."""

    adapter: Adapter
    name: str = ""
    target: str = ""
    shadow: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """Why a route sends all requests to one target, since when, and where it sent them before."""

    reason: str
    at: float  # seconds since 1970
    targets: Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Route:
    """Targets are names of adapters, which mean their current versions, or `name@version`."""

    name: str
    split: TrafficSplit
    rollback: str  # the target of all requests after a roll-back
    set_by: str | None = None  # the key whose right to its targets it has; None: an operator's
    shadow: str | None = None  # it gets copies, and its answers are dropped
    rolled_back: RolledBack | None = None
    shadow_ended: str = ""  # why there are no copies any more
    requests: dict[str, int] = field(default_factory=dict)  # by target, since the route was set
    deaths: dict[str, float] = field(default_factory=dict)  # when an engine last died under requests of a target

    @property
    def weights(self) -> Mapping[str, float]:
        """By target."""
        return self.split.weights

    @property
    def note(self) -> str:
        """Why it is not as it was set; empty if it is."""
        back = f"Rolled back: {self.rolled_back.reason}" if self.rolled_back else ""
        return " ".join(filter(None, (back, self.shadow_ended and f"No more copies: {self.shadow_ended}")))

    @property
    def named(self) -> set[str]:
        """All targets that it needs, also if they get no requests now."""
        return {*self.split.weights, self.rollback, *([self.shadow] if self.shadow else [])}

    def roll_back(self, reason: str, at: float) -> None:
        self.rolled_back = RolledBack(reason=reason, at=at, targets=self.split.weights)
        self.split = TrafficSplit({self.rollback: 1.0})

    def end_shadow(self, reason: str) -> None:
        self.shadow, self.shadow_ended = None, reason
