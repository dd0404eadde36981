"""Stages are the parts of a start: what took how long, and what was tried out there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# ── autotune results ────────────────────────────────────────────────────────────────────────────────────────────────
# An autotune result is what the start of an engine has timed, and what it chose.

# Numbers that say what was chosen; what they mean is known where it is timed.
Choice = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AutotuneResult:
    """Of two autotune results with one name the choice is the same."""

    name: str
    choice: Choice


# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# Two stages that touch for no longer than this ran one after the other.
_TOUCH_S = 0.01
# A shorter one would be told as 0.0 seconds.
SHORTEST_S = 0.05


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a start. It began so many seconds after its process did."""

    name: str
    began_s: float
    took_s: float

    @property
    def ended_s(self) -> float:
        return self.began_s + self.took_s


def total_s(stages: Iterable[Stage]) -> float:
    """How long a start took from its process's beginning on, with what is no stage of its own."""
    return max((stage.ended_s for stage in stages), default=0.0)


def stage_fields(stages: Iterable[Stage]) -> dict[str, float | str]:
    """The fields of a log line; none if no stage is known."""
    known = tuple(stages)
    return {"seconds": round(total_s(known), 1), "stages": described(known)} if known else {}


def described(stages: Iterable[Stage]) -> str:
    """As in `imports 3.1, weights 4.0 (meanwhile kernels 2.2), graphs 1.5`: the longest of several is the one named.

    Stages that took next to no time are left out.
    """
    return ", ".join(map(_group, _groups(stage for stage in stages if stage.took_s >= SHORTEST_S)))


def _groups(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Stages in their order; those that ran at the same time stand together."""
    groups: list[list[Stage]] = []
    for stage in sorted(stages, key=lambda stage: stage.began_s):
        if groups and stage.began_s < total_s(groups[-1]) - _TOUCH_S:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def _group(stages: list[Stage]) -> str:
    first, *others = sorted(stages, key=lambda stage: -stage.took_s)
    beside = ", ".join(map(_one, others))
    return f"{_one(first)} (meanwhile {beside})" if beside else _one(first)


def _one(stage: Stage) -> str:
    return f"{stage.name} {stage.took_s:.1f}"
