"""Exposition writes meters in the text format that Prometheus reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rota.core.events import AdapterStanding, Inspected, SlotChanged, SlotState
from rota.core.ids import FIRST_ENGINE, EngineId
from rota.observe import metric_table as table
from rota.observe.connection_meters import ConnectionMeters
from rota.observe.meters import AdapterMeters, EngineMeters, Histogram, KeyMeters
from rota.observe.metric_table import Metric
from rota.observe.metrics import Metrics
from rota.observe.process_stats import ProcessStats, process_stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one scrape shows. Its histograms and sums may grow by a token while they are written."""

    is_up: bool
    loaded: int
    connections: ConnectionMeters
    lost: int
    slots: tuple[SlotChanged, ...]
    engines: dict[EngineId, EngineMeters]
    adapters: tuple[AdapterMeters, ...]
    keys: tuple[KeyMeters, ...]
    inspected: Inspected | None
    standings: dict[str, list[AdapterStanding]]  # by label
    engine_pid: int | None = None


def snapshot(metrics: Metrics, inspected: Inspected | None, is_up: bool, engine_pid: int | None = None) -> Snapshot:
    """For the thread that moves the meters. `inspected` is None if the engine did not answer."""
    adapters = tuple(metrics.adapters)
    standings: dict[str, list[AdapterStanding]] = {one.label: [] for one in adapters}
    for standing in inspected.adapters if inspected else ():
        standings.setdefault(metrics.meters_of(standing.adapter_id).label, []).append(standing)
    return Snapshot(
        is_up=is_up,
        loaded=len(metrics.loaded),
        connections=metrics.connections,
        lost=len(metrics.lost),
        slots=tuple(metrics.slots.values()),
        engines=metrics.engines.copy(),
        adapters=adapters,
        keys=tuple(metrics.keys),
        inspected=inspected,
        standings=standings,
        engine_pid=engine_pid,
    )


def render(taken: Snapshot) -> bytes:
    """The text, from any thread: for fifty adapters it takes tens of milliseconds, and tokens must not wait for it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(taken))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, taken: Snapshot) -> None:
        self._taken = taken

    def collect(self) -> Iterator[Family]:
        yield _gauges(table.ENGINE_UP, [((str(engine_id),), self._taken.is_up) for engine_id in self._taken.engines])
        yield _gauges(table.ADAPTERS, [((), self._taken.loaded)])
        yield from _of_connections(self._taken.connections)
        yield _gauges(table.LOST, [((), self._taken.lost)])
        yield from _of_processes(self._taken)
        yield from _of_engines(self._taken)
        yield from _of_adapters(self._taken.adapters)
        if self._taken.keys:
            yield from _of_keys(self._taken.keys)
        # Without the engine's answer its own numbers are left out: older numbers may be wrong by now.
        if self._taken.inspected:
            yield from _of_inspection(self._taken, self._taken.inspected)


def _of_connections(meters: ConnectionMeters) -> Iterator[Family]:
    yield _gauges(table.CONNECTIONS, [((), meters.open)])
    yield _gauges(table.CONNECTIONS_LIMIT, [((), meters.most)])
    yield _counters(table.CONNECTIONS_REFUSED, [((why.value,), number) for why, number in meters.refused.items()])
    yield _counters(table.CONNECTIONS_CLOSED, [((why.value,), number) for why, number in meters.closed.items()])


def _of_engines(taken: Snapshot) -> Iterator[Family]:
    engines = [(str(engine_id), engine) for engine_id, engine in taken.engines.items()]
    yield _counters(table.ENGINE_RESTARTS, [((id,), one.restarts) for id, one in engines])
    yield _counters(table.LOSSES, [((id,), one.losses) for id, one in engines])
    yield _histograms(table.STEP_TIME, [((id,), one.step_time) for id, one in engines])
    yield _histograms(table.LOAD_TIME, [((id,), one.load_time) for id, one in engines])
    yield _histograms(table.DELAYER_PASSES, [((id,), one.delay_passes) for id, one in engines])
    yield _histograms(table.DELAYER_WAIT, [((id,), one.delay_wait) for id, one in engines])
    yield _counters(table.COMPUTED_TOKENS, [((id,), one.computed_tokens) for id, one in engines])
    yield _counters(table.ROTATIONS, [((id,), one.rotations) for id, one in engines])
    drains = [((id, state), number) for id, one in engines for state, number in one.drains.copy().items()]
    yield _counters(table.DRAINS, drains)
    delays = [((id, reason), number) for id, one in engines for reason, number in one.delays.copy().items()]
    yield _counters(table.DELAYER_OUTCOMES, delays)


def _of_processes(taken: Snapshot) -> Iterator[Family]:
    """The server's own process, and the engine's if it has one; neither where the system does not tell."""
    if server := process_stats(os.getpid()):
        yield _counters(table.CPU, [((), server.cpu_s)])
        gauges = table.MEMORY, table.FILES, table.MOST_FILES, table.THREADS, table.STARTED
        yield from _of_process(gauges, server, ())
    if engine := process_stats(taken.engine_pid):
        labels = (str(FIRST_ENGINE),)
        yield _counters(table.ENGINE_CPU, [(labels, engine.cpu_s)])
        gauges = (
            table.ENGINE_MEMORY,
            table.ENGINE_FILES,
            table.ENGINE_MOST_FILES,
            table.ENGINE_THREADS,
            table.ENGINE_STARTED,
        )
        yield from _of_process(gauges, engine, labels)


def _of_process(gauges: Sequence[Metric], stats: ProcessStats, labels: Labels) -> Iterator[Family]:
    values = stats.resident_bytes, stats.open_fds, stats.max_fds, stats.threads, stats.started_at
    for gauge, value in zip(gauges, values, strict=True):
        yield _gauges(gauge, [(labels, value)])


def _of_adapters(adapters: Sequence[AdapterMeters]) -> Iterator[Family]:
    outcomes = [((one.label, what), number) for one in adapters for what, number in one.outcomes.copy().items()]
    yield _counters(table.REQUESTS, outcomes)
    yield _histograms(table.TTFT, [((one.label,), one.ttft) for one in adapters])
    yield _histograms(table.QUEUE_WAIT, [((one.label,), one.queue_wait) for one in adapters])
    yield _histograms(table.TOKEN_GAP, [((one.label,), one.token_gap) for one in adapters])
    yield _histograms(table.E2E, [((one.label,), one.e2e) for one in adapters])
    yield _counters(table.PROMPT_TOKENS, [((one.label,), one.prompt_tokens) for one in adapters])
    yield _counters(table.CACHED_TOKENS, [((one.label,), one.cached_tokens) for one in adapters])
    yield _counters(table.OUTPUT_TOKENS, [((one.label,), one.output_tokens) for one in adapters])
    yield _counters(table.PREEMPTIONS, [((one.label,), one.preemptions) for one in adapters])
    yield _counters(table.LOADS, [((one.label,), one.loads) for one in adapters])
    yield _counters(table.EVICTIONS, [((one.label,), one.evictions) for one in adapters])


def _of_keys(keys: Sequence[KeyMeters]) -> Iterator[Family]:
    outcomes = [((one.label, what), number) for one in keys for what, number in one.outcomes.copy().items()]
    yield _counters(table.KEY_REQUESTS, outcomes)
    yield _gauges(table.KEY_OPEN, [((one.label,), one.open) for one in keys])
    yield _histograms(table.KEY_QUEUE_WAIT, [((one.label,), one.queue_wait) for one in keys])
    yield _counters(table.KEY_PROMPT_TOKENS, [((one.label,), one.prompt_tokens) for one in keys])
    yield _counters(table.KEY_OUTPUT_TOKENS, [((one.label,), one.output_tokens) for one in keys])
    limits = [((one.label, limit), number) for one in keys for limit, number in one.limits_met.copy().items()]
    yield _counters(table.KEY_LIMITS, limits)


def _of_inspection(taken: Snapshot, inspected: Inspected) -> Iterator[Family]:
    engine = (str(inspected.engine_id),)
    states = [change.state for change in taken.slots if change.engine_id == inspected.engine_id]
    yield _gauges(table.SLOTS, [(engine, inspected.slots)])
    yield _gauges(table.SLOTS_USED, [(engine, states.count(SlotState.READY))])
    yield _gauges(table.SLOTS_LOADING, [(engine, states.count(SlotState.LOADING))])
    yield _gauges(table.KV_BLOCKS, [(engine, inspected.blocks)])
    yield _gauges(table.KV_BLOCKS_USED, [(engine, inspected.blocks_used)])
    by_label = [((label,), standings) for label, standings in taken.standings.items()]
    yield _gauges(table.WAITING, [(labels, sum(one.waiting for one in ones)) for labels, ones in by_label])
    yield _gauges(table.RUNNING, [(labels, sum(one.running for one in ones)) for labels, ones in by_label])
    yield _gauges(table.PARKED, [(labels, sum(one.parked for one in ones)) for labels, ones in by_label])
    yield _gauges(table.OLDEST_WAIT, [(labels, _oldest_wait_s(ones, inspected.at)) for labels, ones in by_label])


def _oldest_wait_s(standings: list[AdapterStanding], now: float) -> float:
    return max((now - one.oldest_at for one in standings if one.oldest_at is not None), default=0.0)


def _gauges(metric: Metric, samples: Sequence[tuple[Labels, float]]) -> Family:
    family = GaugeMetricFamily(metric.name, metric.sentence, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _counters(metric: Metric, samples: Sequence[tuple[Labels, float]]) -> Family:
    family = CounterMetricFamily(metric.name, metric.sentence, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histograms(metric: Metric, samples: Sequence[tuple[Labels, Histogram]]) -> Family:
    """A bucket of Prometheus also counts all values below it."""
    family = HistogramMetricFamily(metric.name, metric.sentence, labels=metric.labels)
    for labels, histogram in samples:
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        below = accumulate(histogram.counts)
        family.add_metric(labels, list(zip(bounds, below, strict=True)), histogram.sum)
    return family
