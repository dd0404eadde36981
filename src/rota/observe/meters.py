"""Meters are plain numbers that events change, and each is a metric with its name and meaning beside it.

They are formatted only when they are scraped.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from rota.core.adapter import OTHER_LABEL
from rota.observe.metric import Histogram, counter, gauge, histogram

# ── meters ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A library's histogram takes a lock and walks its buckets; at 256 tokens a step that would delay answers. So meters
# have no lock, and only one thread changes them.

# Seconds, from what a client does not notice to what it gives up at.
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAPS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# Of prompts that the prefill delayer held back: in passes, and in seconds.
DELAY_PASSES = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0)
DELAY_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
# End to end includes the whole answer.
LIFETIMES = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


@dataclass(slots=True)
class AdapterMeters:
    """The numbers of one adapter's requests, or of all adapters without meters of their own."""

    label: str
    open: int = 0  # requests that have not ended
    used_at: float = -math.inf
    outcomes: dict[str, int] = counter(
        "rota_requests_total",
        "Requests that ended: by `stop`, `length`, `abort`, or the code of the fault that ended them.",
        by="outcome",
    )
    ttft: Histogram = histogram("rota_ttft_seconds", "From a request's arrival to its first token.", LATENCIES)
    queue_wait: Histogram = histogram(
        "rota_queue_wait_seconds", "From a request's arrival to its admission.", LATENCIES
    )
    token_gap: Histogram = histogram("rota_token_gap_seconds", "Between two tokens of the same request.", GAPS)
    stall: Histogram = histogram(
        "rota_visible_stall_seconds",
        "The longest time in an answer that a reader at --reader-pace stood without text.",
        GAPS,
    )
    e2e: Histogram = histogram(
        "rota_e2e_seconds", "From arrival to end, of requests that ended by `stop` or `length`.", LIFETIMES
    )
    prompt_tokens: int = counter("rota_prompt_tokens_total", "Prompt tokens of requests that had been admitted.")
    cached_tokens: int = counter("rota_cached_tokens_total", "Prompt tokens whose KV was already in the cache.")
    output_tokens: int = counter("rota_output_tokens_total", "Tokens produced.")
    preemptions: int = counter("rota_preemptions_total", "Requests that gave their KV back to be computed again.")
    loads: int = counter("rota_adapter_loads_total", "Copies of an adapter into a slot.")
    evictions: int = counter("rota_adapter_evictions_total", "Adapters that left their slot, for any reason.")


@dataclass(slots=True)
class KeyMeters:
    """The numbers of one key's requests, or of all keys without meters of their own."""

    label: str
    used_at: float = -math.inf
    outcomes: dict[str, int] = counter(
        "rota_key_requests_total",
        "Requests of a key that ended, by the outcomes of `rota_requests_total`.",
        by="outcome",
    )
    open: int = gauge("rota_key_requests_open", "Requests of a key that have not ended.")
    queue_wait: Histogram = histogram(
        "rota_key_queue_wait_seconds", "From the arrival of a key's request to its admission.", LATENCIES
    )
    prompt_tokens: int = counter(
        "rota_key_prompt_tokens_total", "Prompt tokens of a key's requests that had been admitted."
    )
    output_tokens: int = counter("rota_key_output_tokens_total", "Tokens produced for a key.")
    limits_met: dict[str, int] = counter(
        "rota_key_limits_met_total",
        "Calls that a limit of their key refused, by the limit's name in the key file.",
        by="limit",
    )


@dataclass(slots=True)
class EngineMeters:
    """The numbers of one engine as a whole."""

    is_paused: bool = gauge("rota_paused", "1 while the engine is paused: no step is computed until /resume.", False)
    # From zero: an alarm on the growth of a counter does not see its first value.
    standstills: dict[str, int] = counter(
        "rota_standstills_total",
        "How often no step ran for ten seconds while requests were open: they were `waiting` for what was under way, "
        "such as a slow disk, or `stuck`, because nothing was.",
        by="kind",
        of=("waiting", "stuck"),
    )
    restarts: int = counter("rota_engine_restarts_total", "Engines that died and were started again.")
    losses: int = counter("rota_adapter_losses_total", "How often a restarted engine could not read an adapter again.")
    step_time: Histogram = histogram("rota_step_seconds", "How long a step took on the device.", DURATIONS)
    load_time: Histogram = histogram(
        "rota_adapter_load_seconds",
        "From the order of a copy into a slot until steps may use the slot.",
        DURATIONS,
    )
    delay_passes: Histogram = histogram(
        "rota_prefill_delayer_wait_passes", "Passes that prompts were held back, if they were.", DELAY_PASSES
    )
    delay_wait: Histogram = histogram(
        "rota_prefill_delayer_wait_seconds", "Seconds that prompts were held back, if they were.", DELAY_SECONDS
    )
    computed_tokens: int = counter(
        "rota_computed_prompt_tokens_total", "Prompt tokens computed, also for a second time."
    )
    rotations: int = counter("rota_rotations_total", "Adapters that took a slot from an adapter with work left.")
    routes: dict[str, int] = counter(
        "rota_requests_routed_total",
        "Requests that were sent to this one of several engines, by the reason.",
        by="reason",
    )
    drains: dict[str, int] = counter(
        "rota_drains_total", "Drains that were `started`, `finished`, `called_off` or `expired`.", by="state"
    )
    delays: dict[str, int] = counter(
        "rota_prefill_delayer_outcomes_total",
        "Verdicts that let prompts start: `no_wait`, `wait_success`, `wait_timeout` or `token_watermark`.",
        by="reason",
    )


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
    outcomes: dict[str, int]  # of those that have


Meters = TypeVar("Meters", bound=Labelled)


class Places(Generic[Meters]):
    """A label takes a free place at its first request, else the place of a long idle one, else it shares `other`.

    Numbers never move from one place to another: a sum that jumps would look like traffic. A label that loses its
    place and comes back begins at zero; scrapers treat that as a restart.
    """

    def __init__(self, most: int, make: Callable[[str], Meters], always: Sequence[str] = ()) -> None:
        """The labels in `always` need no place."""
        self._most = most
        self._make = make
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

    def begin(self, label: str, at: float) -> Meters:
        """A request begins: the meters that count it to its end."""
        meters = self.take(label, at)
        meters.open += 1
        return meters

    def end(self, meters: Meters, outcome: str, at: float) -> None:
        meters.open -= 1
        self.touch(meters, at)
        count(meters.outcomes, outcome)

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
        if at - longest_idle.used_at < IDLE_S:
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

    open: int = gauge("rota_connections_open", "Connections that are open.")
    # 0: no server listens yet.
    most: int = gauge("rota_connections_limit", "Connections that may be open (`--max-connections`).")
    refused: dict[ConnectionRefusal, int] = counter(
        "rota_connections_refused_total",
        "Connections refused: `address` has as many busy ones as it may have, `all` are busy, or `files` have run out.",
        by="reason",
        of=tuple(ConnectionRefusal),
    )
    closed: dict[Closure, int] = counter(
        "rota_connections_closed_total",
        "Connections closed: `slow_head`, `slow_body`, `slow_reader`, or `made_room` for another while idle.",
        by="reason",
        of=tuple(Closure),
    )


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
    outcomes: dict[str, int] = counter(
        "rota_target_requests_total",
        "Requests that ended, of those that an adapter's traffic route sent to a target; outcomes as above.",
        by="outcome",
    )
    ttft: Histogram = histogram(
        "rota_target_ttft_seconds", "From the arrival of such a request to its first token.", LATENCIES
    )

    @property
    def names(self) -> tuple[str, str]:
        """The routed name and its target."""
        name, _, target = self.label.partition(_BETWEEN)
        return (name, target) if target else (OTHER_LABEL, OTHER_LABEL)


@dataclass(slots=True)
class TrafficMeters:
    """Plain numbers that only the event loop changes."""

    targets: Places[TargetMeters] = field(default_factory=lambda: Places(MOST_TARGETS, TargetMeters))
    _weights: dict[str, Mapping[str, float]] = field(default_factory=dict)
    rollbacks: dict[str, int] = counter(
        "rota_rollbacks_total",
        "Traffic routes that were rolled back because a target computed what is `not_a_number`, `failed` to be read, "
        "was `adapter_failed`, had a source that is away (`source_unavailable`), had no room on the server's disk "
        "(`disk_full`) or met one that fails (`disk_failed`), was `unloaded`, or was served when an engine died, "
        "twice (`engine_died`).",
        by="cause",
    )
    shadows: dict[str, int] = counter(
        "rota_shadow_requests_total",
        "Copies of requests for shadows, by the outcomes of `rota_requests_total`, or `dropped` for want of room.",
        by="outcome",
    )

    @property
    def weights(self) -> list[tuple[tuple[str, str], float]]:
        """The first targets of all routes, by name and target."""
        found = [((name, one), weight) for name, split in self._weights.items() for one, weight in split.items()]
        return found[:MOST_TARGETS]

    def asked(self, name: str, target: str, at: float) -> TargetMeters:
        return self.targets.begin(f"{name}{_BETWEEN}{target}", at)

    def weigh(self, name: str, weights: Mapping[str, float]) -> None:
        """The weights of a name's targets; empty: the name has no route."""
        self._weights.pop(name, None)
        if weights:
            self._weights[name] = weights
