"""A summary says how requests fared: percentiles of what their clients felt, in all and per adapter."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rota.core.events import Event, Finished, FinishReason, Produced
from rota.core.ids import AdapterId, RequestId

PERCENTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class Journey:
    """One request as its client saw it."""

    adapter: AdapterId
    asked_at: float
    first_at: float = math.nan
    last_at: float = math.nan
    ended_at: float = math.nan
    tokens: int = 0
    worst_gap_s: float = 0.0
    reason: FinishReason | None = None


@dataclass(slots=True)
class Recorder:
    """Follows events; `gaps` holds every time between two tokens of a request."""

    journeys: dict[RequestId, Journey] = field(default_factory=dict)
    gaps: array[float] = field(default_factory=lambda: array("d"))

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float) -> None:
        self.journeys[request_id] = Journey(adapter, at)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Produced):
                self._produced(event)
            elif isinstance(event, Finished) and (journey := self.journeys.get(event.request_id)):
                journey.ended_at, journey.reason = event.at, event.reason

    def _produced(self, event: Produced) -> None:
        at, journeys, gaps = event.at, self.journeys, self.gaps
        for request_id in event.request_ids:
            journey = journeys[request_id]
            if journey.tokens:
                gap = at - journey.last_at
                gaps.append(gap)
                if gap > journey.worst_gap_s:
                    journey.worst_gap_s = gap
            else:
                journey.first_at = at
            journey.tokens += 1
            journey.last_at = at

    def summary(self, name_of: Callable[[AdapterId], str] = str) -> dict[str, Any]:
        """The shape that `bench` and `simulate` both write as JSON."""
        by_adapter: dict[str, list[Journey]] = {}
        for journey in self.journeys.values():
            by_adapter.setdefault(name_of(journey.adapter), []).append(journey)
        total = _summarise(list(self.journeys.values()))
        total["itl_s"] = _spread(self.gaps)
        total["adapters"] = {name: _summarise(journeys) for name, journeys in sorted(by_adapter.items())}
        total["fairness"] = jain([one["ttft_s"]["mean"] for one in total["adapters"].values() if one["requests"]])
        return total


def _summarise(journeys: list[Journey]) -> dict[str, Any]:
    served = [one for one in journeys if one.reason in (FinishReason.STOP, FinishReason.LENGTH)]
    begun = min((one.asked_at for one in journeys), default=0.0)
    ended = max((one.ended_at for one in served), default=begun)
    tokens = sum(one.tokens for one in served)
    several = [one for one in served if one.tokens > 1]
    return {
        "requests": len(journeys),
        "failed": sum(one.reason is FinishReason.FAILED for one in journeys),
        "duration_s": ended - begun,
        "output_tokens_per_s": tokens / (ended - begun) if ended > begun else 0.0,
        "ttft_s": _spread([one.first_at - one.asked_at for one in served]),
        "e2e_s": _spread([one.ended_at - one.asked_at for one in served]),
        "tpot_s": _spread([(one.last_at - one.first_at) / (one.tokens - 1) for one in several]),
        "itl_s": _spread([(one.last_at - one.first_at) / (one.tokens - 1) for one in several]),
        "gap_s": _spread([one.worst_gap_s for one in several]),
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum; zeros where there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, **dict.fromkeys(PERCENTILES, 0.0), "max": 0.0}
    ranks = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in PERCENTILES.items()}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def jain(values: list[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
