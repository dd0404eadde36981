"""A window keeps the last minutes as bins of two seconds: the oldest go, however much happens in them."""

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
# A point of a chart looks back this far: a P99 of two quiet seconds would be one request's luck.
SMOOTH_BINS = 5
RATE_BINS = 2  # so that a rate follows what happens, and does not jump


@dataclass(slots=True)
class Share:
    """What one adapter had of a bin."""

    tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)


@dataclass(slots=True)
class Bin:
    """Two seconds of what happened."""

    begun_at: float
    tokens: int = 0
    prompt_tokens: int = 0
    ttft: Histogram = field(default_factory=Counter)
    gap: Histogram = field(default_factory=Counter)
    step: Histogram = field(default_factory=Counter)
    shares: defaultdict[AdapterId, Share] = field(default_factory=lambda: defaultdict(Share))


@dataclass(frozen=True, slots=True)
class Point:
    """A bin as the charts show it."""

    ttft: Spread
    gap: Spread
    step: Spread
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Minute:
    """What an adapter had of the last minute."""

    ttft: Spread
    tokens_per_s: float


class Window:
    """`open` takes what happens now; closed bins become the points of charts and the numbers of the last minute."""

    def __init__(self) -> None:
        self.open = Bin(0.0)
        self.closed = 0  # bins so far: whoever has seen as many charts' points has seen the newest
        self.ttft = self.gap = self.step = Spread()
        self._bins: deque[Bin] = deque(maxlen=MINUTE_BINS)
        self._points: deque[Point] = deque(maxlen=CHART_BINS)
        self._minutes: dict[AdapterId, Minute] = {}

    def roll(self, now: float) -> None:
        """Let the open bin be the one that `now` lies in."""
        if now - self.open.begun_at < BIN_S:
            return
        if now - self.open.begun_at > BIN_S * CHART_BINS:
            # Nobody would see what came before.
            self._bins.clear()
            self._points.clear()
            self._minutes.clear()
            self.ttft = self.gap = self.step = Spread()
            self.open = Bin(now)
        while now - self.open.begun_at >= BIN_S:
            self._close()

    def rates(self, now: float) -> tuple[float, float]:
        """Output and prompt tokens a second, of late."""
        late = [self.open, *islice(reversed(self._bins), RATE_BINS)]
        lasted_s = max(now - late[-1].begun_at, BIN_S)
        return sum(one.tokens for one in late) / lasted_s, sum(one.prompt_tokens for one in late) / lasted_s

    def minute_of(self, adapter: AdapterId) -> Minute:
        """An adapter's last minute; computed once a bin, however many look."""
        minute = self._minutes.get(adapter)
        if minute is None:
            shares = [one.shares[adapter] for one in self._bins if adapter in one.shares]
            tokens = sum(share.tokens for share in shares)
            minute = Minute(spread_of(share.ttft for share in shares), tokens / (BIN_S * max(1, len(self._bins))))
            self._minutes[adapter] = minute
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
        late = list(islice(reversed(self._bins), SMOOTH_BINS))
        self._points.append(
            Point(
                spread_of(one.ttft for one in late),
                spread_of(one.gap for one in late),
                spread_of(one.step for one in late),
                sum(one.tokens for one in late) / (BIN_S * len(late)),
            )
        )
        self.ttft = spread_of(one.ttft for one in self._bins)
        self.gap = spread_of(one.gap for one in self._bins)
        self.step = spread_of(one.step for one in self._bins)
        self._minutes.clear()
        self.closed += 1
        self.open = Bin(done.begun_at + BIN_S)
