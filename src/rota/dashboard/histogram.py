"""A histogram counts durations in buckets of equal ratio, so that a percentile costs the same for any count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from rota.dashboard.frame import Spread

# Neighbouring buckets differ by 5 %, which is too little to see in a chart. From 10 µs to 1,000 s there are at most
# 380 buckets.
_LOG_RATIO = math.log(1.05)
_SHORTEST_S = 1e-5
_LONGEST_S = 1e3

Histogram = Counter[int]


def bucket_of(duration_s: float) -> int:
    return round(math.log(min(max(duration_s, _SHORTEST_S), _LONGEST_S)) / _LOG_RATIO)


def spread_of(histograms: Iterable[Histogram]) -> Spread:
    """Percentiles (nearest rank) of all histograms together."""
    merged: Histogram = Counter()
    for histogram in histograms:
        merged.update(histogram)
    total = merged.total()
    if not total:
        return Spread()
    ordered = sorted(merged)
    return Spread(_percentile(merged, ordered, 0.5 * total), _percentile(merged, ordered, 0.99 * total))


def _percentile(counts: Histogram, ordered: list[int], rank: float) -> float:
    seen = 0
    for bucket in ordered:
        seen += counts[bucket]
        if seen >= rank:
            break
    return round(math.exp(bucket * _LOG_RATIO), 7)
