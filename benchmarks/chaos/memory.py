"""Memory is flat if a process that lives long holds no more at the end of its life than after its warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .invariants import Sample

MOST_GROWTH = 0.05
# The first part of a life fills caches, pools of threads and the allocator's arenas, which stay. An engine on a CPU
# needs about six minutes for that: steps of every size come first.
WARM_UP_SHARE = 0.4
FEWEST_SAMPLES = 16
FEWEST_MINUTES = 10.0


@dataclass(frozen=True, slots=True)
class Growth:
    """The longest life of one process: medians of the first and the last third after the warm-up."""

    minutes: float
    samples: int
    first_mb: float
    last_mb: float

    @property
    def is_judged(self) -> bool:
        """A shorter life is mostly warm-up."""
        return self.samples >= FEWEST_SAMPLES and self.minutes >= FEWEST_MINUTES

    def row(self) -> dict[str, float | bool]:
        grown = self.last_mb / self.first_mb - 1.0
        return {
            "minutes": round(self.minutes, 1),
            "samples": self.samples,
            "first_mb": self.first_mb,
            "last_mb": self.last_mb,
            "growth": round(grown, 4),
            "is_judged": self.is_judged,
        }


def growth_of(samples: Sequence[Sample], role: str) -> Growth:
    """Of the process with this role ('server' or 'engine') that lived through the most samples."""
    lives = [list(life) for _, life in groupby(samples, key=lambda sample: getattr(sample, role).pid)]
    longest = max(lives, key=len)
    warm = longest[int(len(longest) * WARM_UP_SHARE) :]
    third = max(1, len(warm) // 3)
    sizes = [getattr(sample, role).rss_mb for sample in warm]
    return Growth(
        (longest[-1].at_s - longest[0].at_s) / 60.0,
        len(longest),
        round(statistics.median(sizes[:third]), 1),
        round(statistics.median(sizes[-third:]), 1),
    )


def problems_with(growths: dict[str, Growth]) -> list[str]:
    """The processes' memory counts together: one megabyte of a small process is no leak."""
    if not all(growth.is_judged for growth in growths.values()):
        return []
    first, last = (sum(getattr(one, end) for one in growths.values()) for end in ("first_mb", "last_mb"))
    if last <= first * (1.0 + MOST_GROWTH):
        return []
    return [f"memory grew from {first:.0f} to {last:.0f} MB, by {last / first - 1.0:.1%}"]
