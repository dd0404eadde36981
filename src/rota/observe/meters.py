"""Meters are plain numbers that events change; they are formatted only when they are scraped.

A library's histogram takes a lock and walks its buckets; at 256 tokens a step that would delay answers. So meters have
no lock, and only one thread changes them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# Seconds, from what a client does not notice to what it gives up at.
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAPS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# End to end includes the whole answer.
LIFETIMES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """The number of values between one bound and the next, and the sum of all values.

    `written` keeps the text of the last scrape with the counts of then: between two scrapes few histograms change.
    """

    __slots__ = ("bounds", "counts", "sum", "written")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.written: tuple[list[int], str] = ([], "")

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class AdapterMeters:
    """The numbers of one adapter's requests, or of all adapters without meters of their own."""

    label: str
    open: int = 0  # requests that have not ended
    used_at: float = -math.inf
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    queue_wait: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    token_gap: Histogram = field(default_factory=lambda: Histogram(GAPS))
    e2e: Histogram = field(default_factory=lambda: Histogram(LIFETIMES))
    outcomes: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    loads: int = 0
    evictions: int = 0


@dataclass(slots=True)
class KeyMeters:
    """The numbers of one key's requests, or of all keys without meters of their own."""

    label: str
    open: int = 0  # requests that have not ended
    used_at: float = -math.inf
    queue_wait: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    outcomes: dict[str, int] = field(default_factory=dict)
    limits_met: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class EngineMeters:
    """The numbers of one engine as a whole."""

    delay_passes: Histogram
    delay_wait: Histogram
    step_time: Histogram = field(default_factory=lambda: Histogram(DURATIONS))
    load_time: Histogram = field(default_factory=lambda: Histogram(DURATIONS))
    drains: dict[str, int] = field(default_factory=dict)
    delays: dict[str, int] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    # From zero: an alarm on the growth of a counter does not see its first value.
    standstills: dict[str, int] = field(default_factory=lambda: {"waiting": 0, "stuck": 0})
    rotations: int = 0
    computed_tokens: int = 0
    restarts: int = 0
    losses: int = 0
    is_paused: bool = False


def count(counters: dict[str, int], name: str) -> None:
    counters[name] = counters.get(name, 0) + 1
