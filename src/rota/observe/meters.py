"""Meters are plain numbers that events change; they are formatted only when they are scraped."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from rota.core.adapter import OTHER_LABEL

# ── meters ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Meters are plain numbers that events change; they are formatted only when they are scraped.
#
# A library's histogram takes a lock and walks its buckets; at 256 tokens a step that would delay answers. So meters
# have no lock, and only one thread changes them.

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


# ── places ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Places limit how many adapters or keys have meters of their own, however many a server has in its life.

MOST_ADAPTERS = 50
MOST_KEYS = 50

# Several scrapes long: an adapter's last numbers are scraped before its meters go.
IDLE_S = 600.0


class Labelled(Protocol):
    """Meters that can take a place."""

    label: str
    open: int  # requests that have not ended
    used_at: float


Meters = TypeVar("Meters", bound=Labelled)


class Places(Generic[Meters]):
    """A label takes a free place at its first request, else the place of a long idle one, else it shares `other`.

    Numbers never move from one place to another: a sum that jumps would look like traffic. A label that loses its
    place and comes back begins at zero; scrapers treat that as a restart.
    """

    def __init__(
        self, most: int, make: Callable[[str], Meters], always: Sequence[str] = (), idle_s: float = IDLE_S
    ) -> None:
        """The labels in `always` need no place."""
        self._most = most
        self._make = make
        self._idle_s = idle_s
        self._always = {label: make(label) for label in always}
        self._taken: OrderedDict[str, Meters] = OrderedDict()  # used longest ago first
        self.other = make(OTHER_LABEL)

    @property
    def shown(self) -> list[Meters]:
        """All meters; `other` only once it has counted a request."""
        others = [self.other] if self.other.used_at > -math.inf else []
        return [*self._always.values(), *self._taken.values(), *others]

    def has_own(self, label: str) -> bool:
        """Whether a label has a place of its own."""
        return label in self._taken

    def find(self, label: str) -> Meters:
        """The meters that count a label now."""
        return self._always.get(label) or self._taken.get(label, self.other)

    def take(self, label: str, at: float) -> Meters:
        """The meters for a label's new request: in a place of its own if it has one or finds one."""
        meters = self.find(label)
        if meters is self.other and label != OTHER_LABEL and self._make_room(at):
            meters = self._taken[label] = self._make(label)
        self.touch(meters, at)
        return meters

    def touch(self, meters: Meters, at: float) -> None:
        meters.used_at = at
        if meters.label in self._taken:
            self._taken.move_to_end(meters.label)

    def release(self, label: str) -> None:
        """A label is gone: its meters stay until another label needs a place, and then go first."""
        if meters := self._taken.get(label):
            meters.used_at = -math.inf
            self._taken.move_to_end(label, last=False)

    def _make_room(self, at: float) -> bool:
        if len(self._taken) < self._most:
            return True
        if not self._taken:
            return False
        longest_idle = next(iter(self._taken.values()))
        if longest_idle.open:
            self.touch(longest_idle, at)  # not idle: one of its requests takes very long
            return False
        if at - longest_idle.used_at < self._idle_s:
            return False
        del self._taken[longest_idle.label]
        return True


# ── connection meters ───────────────────────────────────────────────────────────────────────────────────────────────
# Connection meters count connections that are open, that were refused, and that the server closed.


class ConnectionRefusal(StrEnum):
    """Why a new connection was refused."""

    ADDRESS = "address"  # its address has as many as it may have, and none of them is idle
    ALL = "all"  # the server has as many as it may have, and none of them is idle
    FILES = "files"  # the process may open no more files


class Closure(StrEnum):
    """Why the server closed a connection that had no answer to wait for, or whose client was too slow."""

    SLOW_HEAD = "slow_head"
    SLOW_BODY = "slow_body"
    SLOW_READER = "slow_reader"
    MADE_ROOM = "made_room"  # it was idle, and another connection came


@dataclass(slots=True)
class ConnectionMeters:
    """Plain numbers that only the event loop changes."""

    open: int = 0
    most: int = 0  # that may be open; 0: no server listens yet
    refused: dict[ConnectionRefusal, int] = field(default_factory=lambda: dict.fromkeys(ConnectionRefusal, 0))
    closed: dict[Closure, int] = field(default_factory=lambda: dict.fromkeys(Closure, 0))


# ── traffic meters ──────────────────────────────────────────────────────────────────────────────────────────────────
# Traffic meters count the requests of each target of a route, roll-backs, and copies for shadows.

MOST_TARGETS = 50
# Names and targets are printable, so none contains it.
_BETWEEN = "\0"


@dataclass(slots=True)
class TargetMeters:
    """The numbers of the requests that a route sent to one target, or of all targets without meters of their own."""

    label: str
    open: int = 0  # requests that have not ended
    used_at: float = -math.inf
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, str]:
        """The routed name and its target."""
        name, _, target = self.label.partition(_BETWEEN)
        return (name, target) if target else (OTHER_LABEL, OTHER_LABEL)


class TrafficMeters:
    """Plain numbers that only the event loop changes."""

    def __init__(self, most_targets: int = MOST_TARGETS) -> None:
        self._targets = Places(most_targets, TargetMeters)
        self._most_targets = most_targets
        self._weights: dict[str, Mapping[str, float]] = {}
        self.rollbacks: dict[str, int] = {}  # by cause
        self.shadows: dict[str, int] = {}  # by outcome

    @property
    def targets(self) -> list[TargetMeters]:
        return self._targets.shown

    @property
    def weights(self) -> list[tuple[tuple[str, str], float]]:
        """The first targets of all routes, by name and target."""
        found = [((name, one), weight) for name, split in self._weights.items() for one, weight in split.items()]
        return found[: self._most_targets]

    def asked(self, name: str, target: str, at: float) -> TargetMeters:
        meters = self._targets.take(f"{name}{_BETWEEN}{target}", at)
        meters.open += 1
        return meters

    def ended(self, meters: TargetMeters, outcome: str, ttft_s: float | None, at: float) -> None:
        meters.open -= 1
        self._targets.touch(meters, at)
        count(meters.outcomes, outcome)
        if ttft_s is not None:
            meters.ttft.add(ttft_s)

    def weigh(self, name: str, weights: Mapping[str, float]) -> None:
        """The weights of a name's targets; empty: the name has no route."""
        self._weights.pop(name, None)
        if weights:
            self._weights[name] = weights

    def rolled_back(self, cause: str) -> None:
        count(self.rollbacks, cause)

    def shadowed(self, outcome: str) -> None:
        count(self.shadows, outcome)
