"""A window keeps the last five minutes as bins of two seconds, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from rota.dashboard.frame import Charts, Point, Spread

# ── histogram ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A histogram counts durations in buckets of equal ratio, so that a percentile costs the same for any count.

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


Kind = TypeVar("Kind", bound=Hashable)

BIN_S = 2.0
# What a reader may choose: the last minute, or five. Tiles, tables and charts then show the same time.
SPANS_S = (60, 300)
CHART_BINS = int(SPANS_S[-1] / BIN_S)
# A chart's point covers this many bins: in two quiet seconds the P99 would be a single request.
SMOOTH_BINS = 5
RATE_BINS = 2  # few enough to follow the traffic, enough not to jump


@dataclass(slots=True)
class Share:
    """The part of a bin that is one adapter's or one tenant's."""

    tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)


@dataclass(slots=True)
class Bin:
    """The counts of two seconds. Adapters share by their ids, tenants by their names."""

    begun_at: float
    tokens: int = 0
    prompt_tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)
    gap: Histogram = field(default_factory=Counter)
    step: Histogram = field(default_factory=Counter)
    stall: Histogram = field(default_factory=Counter)
    shares: defaultdict[Hashable, Share] = field(default_factory=lambda: defaultdict(Share))
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Figures:
    """One adapter's or one tenant's figures."""

    ttft: Spread
    tokens_per_s: float


_NOTHING = Figures(Spread(), 0.0)


class Span:
    """The sum of the last bins. A bin is added when it closes and taken away when it is too old, so that a sum costs
    the same for a minute and for five."""

    def __init__(self, seconds: int) -> None:
        self._most = int(seconds / BIN_S)
        self._bins: deque[Bin] = deque()
        self.total = Bin(0.0)
        self._figures: dict[Hashable, Figures] = {}
        self.ttft = self.gap = self.step = self.stall = Spread()

    def add(self, closed: Bin) -> None:
        self._bins.append(closed)
        _count(self.total, closed, 1)
        if len(self._bins) > self._most:
            _count(self.total, self._bins.popleft(), -1)
        self._figures.clear()
        self.ttft, self.gap, self.step, self.stall = (spread_of([one]) for one in _histograms(self.total))

    @property
    def tokens_per_s(self) -> float:
        return self.total.tokens / self._lasted_s

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.total.prompt_tokens / self._lasted_s

    def figures_of(self, sharer: Hashable) -> Figures:
        """One adapter's or tenant's. They are computed once per bin, for any number of readers."""
        figures = self._figures.get(sharer)
        if figures is None:
            share = self.total.shares.get(sharer)
            figures = Figures(spread_of([share.ttft]), share.tokens / self._lasted_s) if share else _NOTHING
            self._figures[sharer] = figures
        return figures

    @property
    def _lasted_s(self) -> float:
        return BIN_S * max(1, len(self._bins))


def _histograms(one: Bin) -> tuple[Histogram, ...]:
    return one.ttft, one.gap, one.step, one.stall


def _count(total: Bin, one: Bin, sign: int) -> None:
    """Add a bin to a sum, or take it away. What is zero is forgotten."""
    total.tokens += sign * one.tokens
    total.prompt_tokens += sign * one.prompt_tokens
    for whole, part in zip(_histograms(total), _histograms(one), strict=True):
        _count_each(whole, part, sign)
    _count_each(total.errors, one.errors, sign)
    for sharer, share in one.shares.items():
        sum_of = total.shares[sharer]
        sum_of.tokens += sign * share.tokens
        _count_each(sum_of.ttft, share.ttft, sign)
        if not sum_of.tokens:
            del total.shares[sharer]


def _count_each(whole: Counter[Kind], part: Counter[Kind], sign: int) -> None:
    for kind, count in part.items():
        whole[kind] += sign * count
        if not whole[kind]:
            del whole[kind]


class ChartWindow:
    """`open` counts the present. Closed bins become points of the charts, and parts of the spans."""

    def __init__(self) -> None:
        self.closed = 0  # bins closed so far; a reader that has seen this number has the newest charts
        self._begin(0.0)

    def _begin(self, at: float) -> None:
        self.open = Bin(at)
        self.spans = {seconds: Span(seconds) for seconds in SPANS_S}
        self._recent: deque[Bin] = deque(maxlen=SMOOTH_BINS)
        self._points: deque[Point] = deque(maxlen=CHART_BINS)

    def roll(self, now: float) -> None:
        """Close bins until `now` lies in the open bin."""
        if now - self.open.begun_at < BIN_S:
            return
        if now - self.open.begun_at > BIN_S * CHART_BINS:
            self._begin(now)  # the charts show nothing from before the pause
        while now - self.open.begun_at >= BIN_S:
            self._close()

    def rates(self, now: float) -> tuple[float, float]:
        """Output and prompt tokens per second, over the last bins."""
        recent = [self.open, *islice(reversed(self._recent), RATE_BINS)]
        lasted_s = max(now - recent[-1].begun_at, BIN_S)
        return sum(one.tokens for one in recent) / lasted_s, sum(one.prompt_tokens for one in recent) / lasted_s

    def charts(self, seconds: int = SPANS_S[-1]) -> Charts:
        points = tuple(self._points)[-int(seconds / BIN_S) :]
        return Charts(ended_at=self.open.begun_at, every_s=BIN_S, points=points)

    def _close(self) -> None:
        done = self.open
        self._recent.append(done)
        recent = self._recent
        self._points.append(
            Point(
                spread_of(one.ttft for one in recent),
                spread_of(one.gap for one in recent),
                spread_of(one.step for one in recent),
                sum(one.tokens for one in recent) / (BIN_S * len(recent)),
            )
        )
        for span in self.spans.values():
            span.add(done)
        self.closed += 1
        self.open = Bin(done.begun_at + BIN_S)
