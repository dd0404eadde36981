"""A window keeps the last five minutes as bins of two seconds, in bounded memory."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import islice

from rota.core.ids import AdapterId
from rota.dashboard.frame import Charts, Spread
from rota.dashboard.histogram import Histogram, spread_of

BIN_S = 2.0
CHART_BINS = 150  # five minutes
MINUTE_BINS = 30
# A chart's point covers this many bins: in two quiet seconds the P99 would be a single request.
SMOOTH_BINS = 5
RATE_BINS = 2  # few enough to follow the traffic, enough not to jump


@dataclass(slots=True)
class Share:
    """One adapter's part of a bin."""

    tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)


@dataclass(slots=True)
class Bin:
    """The counts of two seconds."""

    begun_at: float
    tokens: int = 0
    prompt_tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)
    gap: Histogram = field(default_factory=Counter)
    step: Histogram = field(default_factory=Counter)
    shares: defaultdict[AdapterId, Share] = field(default_factory=lambda: defaultdict(Share))


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the charts."""

    ttft: Spread
    gap: Spread
    step: Spread
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Minute:
    """One adapter's figures of the last minute."""

    ttft: Spread
    tokens_per_s: float


class Window:
    """`open` counts the present. Closed bins become points of the charts and figures of the last minute."""

    def __init__(self) -> None:
        self.open = Bin(0.0)
        self.closed = 0  # bins closed so far; a reader that has seen this number has the newest charts
        self.ttft = self.gap = self.step = Spread()
        self._bins: deque[Bin] = deque(maxlen=MINUTE_BINS)
        self._points: deque[Point] = deque(maxlen=CHART_BINS)
        self._minutes: dict[AdapterId, Minute] = {}

    def roll(self, now: float) -> None:
        """Close bins until `now` lies in the open bin."""
        if now - self.open.begun_at < BIN_S:
            return
        if now - self.open.begun_at > BIN_S * CHART_BINS:
            # The charts show nothing from before the pause.
            self._bins.clear()
            self._points.clear()
            self._minutes.clear()
            self.ttft = self.gap = self.step = Spread()
            self.open = Bin(now)
        while now - self.open.begun_at >= BIN_S:
            self._close()

    def rates(self, now: float) -> tuple[float, float]:
        """Output and prompt tokens per second, over the last bins."""
        recent = [self.open, *islice(reversed(self._bins), RATE_BINS)]
        lasted_s = max(now - recent[-1].begun_at, BIN_S)
        return sum(one.tokens for one in recent) / lasted_s, sum(one.prompt_tokens for one in recent) / lasted_s

    def minute_of(self, adapter_id: AdapterId) -> Minute:
        """An adapter's last minute. It is computed once per bin, for any number of readers."""
        minute = self._minutes.get(adapter_id)
        if minute is None:
            shares = [one.shares[adapter_id] for one in self._bins if adapter_id in one.shares]
            tokens = sum(share.tokens for share in shares)
            minute = Minute(spread_of(share.ttft for share in shares), tokens / (BIN_S * max(1, len(self._bins))))
            self._minutes[adapter_id] = minute
        return minute

    def charts(self) -> Charts:
        points = self._points
        return Charts(
            ended_at=self.open.begun_at,
            every_s=BIN_S,
            ttft=tuple(point.ttft for point in points),
            gap=tuple(point.gap for point in points),
            step=tuple(point.step for point in points),
            tokens_per_s=tuple(point.tokens_per_s for point in points),
        )

    def _close(self) -> None:
        done = self.open
        self._bins.append(done)
        recent = list(islice(reversed(self._bins), SMOOTH_BINS))
        self._points.append(
            Point(
                spread_of(one.ttft for one in recent),
                spread_of(one.gap for one in recent),
                spread_of(one.step for one in recent),
                sum(one.tokens for one in recent) / (BIN_S * len(recent)),
            )
        )
        self.ttft = spread_of(one.ttft for one in self._bins)
        self.gap = spread_of(one.gap for one in self._bins)
        self.step = spread_of(one.step for one in self._bins)
        self._minutes.clear()
        self.closed += 1
        self.open = Bin(done.begun_at + BIN_S)
