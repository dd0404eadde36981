"""A window keeps the last five minutes as bins of two seconds, and the last hour as bins of thirty."""

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
# What a reader may choose, each with the time between two points of its charts. Tiles, tables and charts then show the
# same time. An hour of short bins would take too much memory where hundreds of adapters are busy.
EVERY_S = {60: BIN_S, 300: BIN_S, 3600: 30.0}
SPANS_S = tuple(EVERY_S)
# A chart's point covers at least this time: in two quiet seconds the P99 would be a single request.
SMOOTH_S = 10.0
RATE_BINS = 2  # few enough to follow the traffic, enough not to jump


@dataclass(slots=True)
class Share:
    """The part of a bin that is one adapter's, one tenant's or one engine's."""

    tokens: int = 0
    loads: int = 0  # copies into a slot
    ttft: Histogram = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Bin:
    """The counts of one stretch of time. Adapters share by their ids, tenants by their names."""

    begun_at: float
    tokens: int = 0
    prompt_tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)
    gap: Histogram = field(default_factory=Counter)
    step: Histogram = field(default_factory=Counter)
    stall: Histogram = field(default_factory=Counter)
    shares: defaultdict[Hashable, Share] = field(default_factory=lambda: defaultdict(Share))
    errors: Counter[str] = field(default_factory=Counter)
    waiting: int = 0  # the most requests that waited at one moment
    admitted: int = 0  # and the most that ran or were parked


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one adapter, tenant or engine."""

    ttft: Spread = field(default_factory=Spread)
    tokens_per_s: float = 0.0
    loads: int = 0
    errors: tuple[tuple[str, int], ...] = ()


_NOTHING = Figures()


class Span:
    """The sum of the last bins, and a chart's point for each.

    A bin is added when it closes and taken away when it is too old, so a sum costs the same for a minute and an hour.
    """

    def __init__(self, seconds: int, every_s: float = BIN_S) -> None:
        self.every_s = every_s
        self._most = int(seconds / every_s)
        self._bins: deque[Bin] = deque()
        self._part = Bin(0.0)  # the sum of the bins that are no point yet
        self._parts = 0
        self.total = Bin(0.0)
        self.points: deque[Point] = deque(maxlen=self._most)
        self._figures: dict[Hashable, Figures] = {}
        self._spreads: dict[str, Spread] = {}

    def add(self, closed: Bin) -> None:
        _count(self.total, closed, 1)
        if self.every_s == BIN_S:
            self._part = closed  # shared by the spans, and changed by none
        else:
            self._part = self._part if self._parts else Bin(closed.begun_at)
            _count(self._part, closed, 1)
        self._parts += 1
        if self._parts * BIN_S >= self.every_s:
            self._bins.append(self._part)
            self._parts = 0
            self._note_point()
        if len(self._bins) > self._most:
            _count(self.total, self._bins.popleft(), -1)
        self._figures.clear()
        self._spreads.clear()

    @property
    def tokens_per_s(self) -> float:
        return self.total.tokens / self._lasted_s

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.total.prompt_tokens / self._lasted_s

    def spread(self, name: str) -> Spread:
        """Of `ttft`, `gap`, `step` or `stall`."""
        if name not in self._spreads:
            self._spreads[name] = spread_of([getattr(self.total, name)])
        return self._spreads[name]

    def figures_of(self, sharer: Hashable) -> Figures:
        """One sharer's figures. They are computed once per bin, for any number of readers."""
        figures = self._figures.get(sharer)
        if figures is None:
            share = self.total.shares.get(sharer)
            figures = self._computed(share) if share else _NOTHING
            self._figures[sharer] = figures
        return figures

    def _computed(self, share: Share) -> Figures:
        errors = tuple(share.errors.most_common())
        return Figures(spread_of([share.ttft]), share.tokens / self._lasted_s, share.loads, errors)

    def _note_point(self) -> None:
        last = self._bins[-1]
        recent = list(islice(reversed(self._bins), max(1, round(SMOOTH_S / self.every_s))))
        lasted_s = self.every_s * len(recent)
        self.points.append(
            Point(
                ttft=spread_of(one.ttft for one in recent),
                gap=spread_of(one.gap for one in recent),
                step=spread_of(one.step for one in recent),
                tokens_per_s=sum(one.tokens for one in recent) / lasted_s,
                waiting=last.waiting,
                admitted=last.admitted,
                errors_per_min=60.0 * sum(one.errors.total() for one in recent) / lasted_s,
            )
        )

    @property
    def _lasted_s(self) -> float:
        return max(BIN_S, self.every_s * len(self._bins) + BIN_S * self._parts)


def _histograms(one: Bin) -> tuple[Histogram, ...]:
    return one.ttft, one.gap, one.step, one.stall


def _count(total: Bin, one: Bin, sign: int) -> None:
    """Add a bin to a sum, or take it away. What is zero is forgotten."""
    total.tokens += sign * one.tokens
    total.prompt_tokens += sign * one.prompt_tokens
    # These are no sums: they are read of parts only, from which nothing is taken away.
    total.waiting, total.admitted = max(total.waiting, one.waiting), max(total.admitted, one.admitted)
    for whole, part in zip(_histograms(total), _histograms(one), strict=True):
        _count_each(whole, part, sign)
    _count_each(total.errors, one.errors, sign)
    for sharer, share in one.shares.items():
        sum_of = total.shares[sharer]
        sum_of.tokens += sign * share.tokens
        sum_of.loads += sign * share.loads
        _count_each(sum_of.ttft, share.ttft, sign)
        _count_each(sum_of.errors, share.errors, sign)
        if not (sum_of.tokens or sum_of.loads or sum_of.errors):
            del total.shares[sharer]


def _count_each(whole: Counter[Kind], part: Counter[Kind], sign: int) -> None:
    for kind, count in part.items():
        whole[kind] += sign * count
        if not whole[kind]:
            del whole[kind]


class ChartWindow:
    """`open` counts the present. Closed bins become parts of the spans and points of their charts."""

    def __init__(self) -> None:
        self.closed = 0  # bins closed so far; a reader that has seen this number has the newest charts
        self._begin(0.0)

    def _begin(self, at: float) -> None:
        self.open = Bin(at)
        self.spans = {seconds: Span(seconds, every_s) for seconds, every_s in EVERY_S.items()}
        self._recent: deque[Bin] = deque(maxlen=RATE_BINS)
        self._held = (0, 0)

    def hold(self, waiting: int, admitted: int) -> None:
        """So many requests wait, and so many are admitted, from now on."""
        self._held = (waiting, admitted)
        self.open.waiting = max(self.open.waiting, waiting)
        self.open.admitted = max(self.open.admitted, admitted)

    def roll(self, now: float) -> None:
        """Close bins until `now` lies in the open bin."""
        if now - self.open.begun_at > SPANS_S[-1]:
            self._begin(now)  # the charts show nothing from before the pause
        while now - self.open.begun_at >= BIN_S:
            self._close()

    def rates(self, now: float) -> tuple[float, float]:
        """Output and prompt tokens per second, over the last bins."""
        recent = [self.open, *reversed(self._recent)]
        lasted_s = max(now - recent[-1].begun_at, BIN_S)
        return sum(one.tokens for one in recent) / lasted_s, sum(one.prompt_tokens for one in recent) / lasted_s

    def charts(self, seconds: int = SPANS_S[0]) -> Charts:
        span = self.spans[seconds]
        return Charts(ended_at=self.open.begun_at, every_s=span.every_s, points=tuple(span.points))

    def _close(self) -> None:
        done = self.open
        self._recent.append(done)
        for span in self.spans.values():
            span.add(done)
        self.closed += 1
        self.open = Bin(done.begun_at + BIN_S, waiting=self._held[0], admitted=self._held[1])
