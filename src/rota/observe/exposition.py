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
class EngineReport:
    """One engine at the moment of a scrape."""

    engine_id: EngineId = FIRST_ENGINE
    is_up: bool = True
    is_given_up: bool = False
    pid: int | None = None  # of an engine that has a process of its own
    inspected: Inspected | None = None  # None if the engine did not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one scrape shows. Its histograms and sums may grow by a token while they are written."""

    reports: tuple[EngineReport, ...]
    loaded: int
    connections: ConnectionMeters
    lost: int
    slots: tuple[SlotChanged, ...]
    engines: dict[EngineId, EngineMeters]
    adapters: tuple[AdapterMeters, ...]
    keys: tuple[KeyMeters, ...]
    standings: dict[str, list[AdapterStanding]]  # by label, of all engines


def snapshot(metrics: Metrics, reports: Sequence[EngineReport]) -> Snapshot:
    """For the thread that moves the meters."""
    adapters = tuple(metrics.adapters)
    standings: dict[str, list[AdapterStanding]] = {one.label: [] for one in adapters}
    for standing in (one for report in reports if report.inspected for one in report.inspected.adapters):
        standings.setdefault(metrics.meters_of(standing.adapter_id).label, []).append(standing)
    return Snapshot(
        reports=tuple(reports),
        loaded=len(metrics.loaded),
        connections=metrics.connections,
        lost=len(metrics.lost),
        slots=tuple(metrics.slots.values()),
        engines=metrics.engines.copy(),
        adapters=adapters,
        keys=tuple(metrics.keys),
        standings=standings,
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
        reports = [((str(report.engine_id),), report) for report in self._taken.reports]
        yield _gauges(table.ENGINE_UP, [(labels, report.is_up) for labels, report in reports])
        yield _gauges(table.ENGINE_GIVEN_UP, [(labels, report.is_given_up) for labels, report in reports])
        yield _gauges(table.ADAPTERS, [((), self._taken.loaded)])
        yield from _of_connections(self._taken.connections)
        yield _gauges(table.LOST, [((), self._taken.lost)])
        yield from _of_processes(self._taken)
        yield from _of_engines(self._taken)
        yield from _of_adapters(self._taken.adapters)
        if self._taken.keys:
            yield from _of_keys(self._taken.keys)
        # Without an engine's answer its own numbers are left out: older numbers may be wrong by now.
        if inspected := [report.inspected for report in self._taken.reports if report.inspected]:
            yield from _of_inspections(self._taken, inspected)


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
    routes = [((id, reason), number) for id, one in engines for reason, number in one.routes.copy().items()]
    yield _counters(table.ROUTED, routes)
    drains = [((id, state), number) for id, one in engines for state, number in one.drains.copy().items()]
    yield _counters(table.DRAINS, drains)
    delays = [((id, reason), number) for id, one in engines for reason, number in one.delays.copy().items()]
    yield _counters(table.DELAYER_OUTCOMES, delays)


def _of_processes(taken: Snapshot) -> Iterator[Family]:
    """The server's own process, and those of the engines that have one; none where the system does not tell."""
    if server := process_stats(os.getpid()):
        yield _counters(table.CPU, [((), server.cpu_s)])
        gauges = table.MEMORY, table.FILES, table.MOST_FILES, table.THREADS, table.STARTED
        yield from _of_process(gauges, [((), server)])
    found = [(report, process_stats(report.pid)) for report in taken.reports]
    engines = [((str(report.engine_id),), stats) for report, stats in found if stats]
    if engines:
        yield _counters(table.ENGINE_CPU, [(labels, stats.cpu_s) for labels, stats in engines])
        gauges = (
            table.ENGINE_MEMORY,
            table.ENGINE_FILES,
            table.ENGINE_MOST_FILES,
            table.ENGINE_THREADS,
            table.ENGINE_STARTED,
        )
        yield from _of_process(gauges, engines)


def _of_process(gauges: Sequence[Metric], processes: Sequence[tuple[Labels, ProcessStats]]) -> Iterator[Family]:
    values = [
        (labels, (one.resident_bytes, one.open_fds, one.max_fds, one.threads, one.started_at))
        for labels, one in processes
    ]
    for position, gauge in enumerate(gauges):
        yield _gauges(gauge, [(labels, of_one[position]) for labels, of_one in values])


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


def _of_inspections(taken: Snapshot, inspected: Sequence[Inspected]) -> Iterator[Family]:
    """The numbers of each engine, and those of each adapter over all engines."""
    by_engine = [((str(one.engine_id),), one) for one in inspected]
    states = {
        one.engine_id: [slot.state for slot in taken.slots if slot.engine_id == one.engine_id] for one in inspected
    }
    yield _gauges(table.SLOTS, [(labels, one.slots) for labels, one in by_engine])
    ready, loading = SlotState.READY, SlotState.LOADING
    yield _gauges(table.SLOTS_USED, [(labels, states[one.engine_id].count(ready)) for labels, one in by_engine])
    yield _gauges(table.SLOTS_LOADING, [(labels, states[one.engine_id].count(loading)) for labels, one in by_engine])
    yield _gauges(table.KV_BLOCKS, [(labels, one.blocks) for labels, one in by_engine])
    yield _gauges(table.KV_BLOCKS_USED, [(labels, one.blocks_used) for labels, one in by_engine])
    by_label, now = [((label,), standings) for label, standings in taken.standings.items()], inspected[-1].at
    yield _gauges(table.WAITING, [(labels, sum(one.waiting for one in ones)) for labels, ones in by_label])
    yield _gauges(table.RUNNING, [(labels, sum(one.running for one in ones)) for labels, ones in by_label])
    yield _gauges(table.PARKED, [(labels, sum(one.parked for one in ones)) for labels, ones in by_label])
    yield _gauges(table.OLDEST_WAIT, [(labels, _oldest_wait_s(ones, now)) for labels, ones in by_label])


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
