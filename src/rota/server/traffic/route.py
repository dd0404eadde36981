"""A route sends the requests of one name to several versions or adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.server.traffic.split import Split


@dataclass(frozen=True, slots=True)
class Chosen:
    """The adapter of a request. If a route chose it: by which name, which target, and who gets a copy."""

    adapter: Adapter
    name: str = ""
    target: str = ""
    shadow: Adapter | None = None

    @property
    def adapter_id(self) -> AdapterId:
        return self.adapter.adapter_id


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
    split: Split
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
        self.split = Split({self.rollback: 1.0})

    def end_shadow(self, reason: str) -> None:
        self.shadow, self.shadow_ended = None, reason
