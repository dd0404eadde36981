"""Exposition writes meters in the text format that Prometheus reads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, islice
from pathlib import Path

from rota.core.adapter import OTHER_LABEL
from rota.core.capacity import Capacity
from rota.core.events import AdapterStanding, Inspected, SlotChanged, SlotState
from rota.core.ids import FIRST_ENGINE, EngineId
from rota.observe import metric_table as table
from rota.observe.meters import AdapterMeters, ConnectionMeters, EngineMeters, Histogram, KeyMeters, TrafficMeters
from rota.observe.metric_table import Metric
from rota.observe.metrics import Metrics

# ── text format ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The text format of Prometheus, written in pieces that take a fraction of a millisecond each.
#
# A library's writer takes tens of milliseconds for fifty adapters, and the endpoint picker scrapes twenty times a
# second.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Histograms in one piece: some 0.1 ms.
PIECE = 16

# Characters of a label's value that is kept for the next scrape.
MOST_REMEMBERED = 256

Labels = tuple[str, ...]


def numbers(metric: Metric, samples: Iterable[tuple[Labels, float]]) -> str:
    """A gauge or a counter."""
    name = metric.name
    return _head(metric) + "".join([f"{name}{_braced(metric, labels)} {_number(value)}\n" for labels, value in samples])


def histograms(metric: Metric, samples: Iterable[tuple[Labels, Histogram]]) -> Iterator[str]:
    """A bucket of Prometheus also counts all values below it."""
    yield _head(metric)
    remaining = iter(samples)
    while piece := [_histogram(metric, labels, one) for labels, one in islice(remaining, PIECE)]:
        yield "".join(piece)


def _histogram(metric: Metric, labels: Labels, histogram: Histogram) -> str:
    counts, text = histogram.written
    if counts == histogram.counts:
        return text
    template = _template(metric.name, histogram.bounds, _pairs(metric, labels))
    counts = histogram.counts.copy()
    below = [*accumulate(counts)]
    text = template % (*below, below[-1], histogram.sum)
    histogram.written = (counts, text)
    return text


@lru_cache(maxsize=4096)
def _template(name: str, bounds: tuple[float, ...], pairs: str) -> str:
    """The lines of one histogram, with fields for its buckets, its count and its sum."""
    name, pairs = name.replace("%", "%%"), pairs.replace("%", "%%")
    marks = [*map(_number, bounds), "+Inf"]
    buckets = [f'{name}_bucket{{{pairs},le="{mark}"}} %d\n' for mark in marks]
    return f"{''.join(buckets)}{name}_count{{{pairs}}} %d\n{name}_sum{{{pairs}}} %r\n"


@cache
def _head(metric: Metric) -> str:
    return f"# HELP {metric.name} {metric.sentence}\n# TYPE {metric.name} {metric.kind}\n"


def _braced(metric: Metric, labels: Labels) -> str:
    return f"{{{_pairs(metric, labels)}}}" if labels else ""


def _pairs(metric: Metric, labels: Labels) -> str:
    # Names recur in many metrics and in every scrape; lists of a thousand names do not.
    is_short = len(labels[-1]) <= MOST_REMEMBERED
    return (_remembered if is_short else _joined)(metric.labels, labels)


def _joined(names: Labels, values: Labels) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)])


_remembered = lru_cache(maxsize=4096)(_joined)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


# ── process stats ───────────────────────────────────────────────────────────────────────────────────────────────────
# Process stats are what Linux tells about a process: processor time, memory, open files, threads, its start.

PROC = Path("/proc")

# Fields of /proc/PID/stat behind the name of the program, as proc(5) counts them, less three.
_USER, _SYSTEM, _THREADS, _STARTED, _RESIDENT = 11, 12, 17, 19, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """One process at one moment."""

    cpu_s: float
    resident_bytes: int
    threads: int
    open_fds: int
    max_fds: float
    started_at: float  # seconds since 1970


def process_stats(pid: int | None, proc: Path = PROC) -> ProcessStats | None:
    """None if there is no such process, or if the system has no /proc."""
    if pid is None:
        return None
    folder = proc / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        return ProcessStats(
            cpu_s=(int(fields[_USER]) + int(fields[_SYSTEM])) / ticks,
            resident_bytes=int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE"),
            threads=int(fields[_THREADS]),
            open_fds=len(os.listdir(folder / "fd")),
            max_fds=_max_fds(folder / "limits"),
            started_at=_boot_time(proc) + int(fields[_STARTED]) / ticks,
        )
    except OSError:
        return None


def _max_fds(limits: Path) -> float:
    line = next(line for line in limits.read_text().splitlines() if line.startswith("Max open files"))
    soft = line.split()[3]
    return float("inf") if soft == "unlimited" else float(soft)


@cache
def _boot_time(proc: Path) -> float:
    lines = (proc / "stat").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("btime ")).split()[1])


# ── picker metrics ──────────────────────────────────────────────────────────────────────────────────────────────────
# Picker metrics are totals under the names that the endpoint picker of Kubernetes reads without configuration.
#
# The names are vLLM's. The rules are the model server protocol of the Gateway API Inference Extension.


def _gauge(name: str, sentence: str, *labels: str) -> Metric:
    return Metric(kind="gauge", name=f"vllm:{name}", labels=labels, sentence=sentence)


WAITING = _gauge("num_requests_waiting", "Requests that wait: in the queue, or parked.")
RUNNING = _gauge("num_requests_running", "Requests that take part in steps.")
KV_USAGE = _gauge("kv_cache_usage_perc", "The part of all KV blocks that requests hold, from 0 to 1.")
CACHE = _gauge(
    "cache_config_info",
    "Always 1; the labels are the size of KV blocks and their number.",
    "block_size",
    "num_gpu_blocks",
)
ADAPTERS = _gauge(
    "lora_requests_info",
    "When this was written, in seconds since 1970; the labels are how many adapters the slots hold, the adapters that "
    "are ready in a slot, and those that wait for one.",
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
)

PICKER_METRICS = (WAITING, RUNNING, KV_USAGE, CACHE, ADAPTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerTotals:
    """What the picker reads: numbers over all engines."""

    at: float  # seconds since 1970
    capacities: tuple[Capacity, ...]
    inspected: tuple[Inspected, ...]
    ready: tuple[str, ...]  # names of the adapters that are ready in a slot of any engine
    waiting: tuple[str, ...]  # names of the adapters that have requests and are ready in no slot


def picker_totals(
    metrics: Metrics, capacities: Iterable[Capacity], inspected: Sequence[Inspected], at: float
) -> PickerTotals:
    """For the thread that moves the meters. `at` is in seconds since 1970."""
    changes = metrics.slots.values()
    ready = {change.adapter_id for change in changes if change.state is SlotState.READY}
    wanted = {one for engine in inspected for one in engine.absent} | {change.adapter_id for change in changes}
    return PickerTotals(
        at=at,
        capacities=tuple(capacities),
        inspected=tuple(inspected),
        ready=_listed(metrics.name_of(one) for one in sorted(ready)),
        waiting=_listed(metrics.name_of(one) for one in sorted(wanted - ready)),
    )


def picker_pieces(totals: PickerTotals) -> Iterator[str]:
    capacities, inspected = totals.capacities, totals.inspected
    if inspected:  # as with our own names: older numbers may be wrong by now
        standings = [one for engine in inspected for one in _standings(engine)]
        yield numbers(WAITING, [((), sum(one.waiting + one.parked for one in standings))])
        yield numbers(RUNNING, [((), sum(one.running for one in standings))])
        blocks = sum(one.blocks for one in inspected)
        yield numbers(KV_USAGE, [((), sum(one.blocks_used for one in inspected) / max(blocks, 1))])
    if capacities:
        blocks = sum(one.blocks for one in capacities)
        yield numbers(CACHE, [((str(capacities[0].block_size), str(blocks)), 1)])
        slots = sum(one.slots for one in capacities)
        yield numbers(ADAPTERS, [((str(slots), ",".join(totals.ready), ",".join(totals.waiting)), totals.at)])


def _standings(engine: Inspected) -> tuple[AdapterStanding, ...]:
    return engine.adapters if engine.others is None else (*engine.adapters, engine.others)


def _listed(names: Iterable[str | None]) -> tuple[str, ...]:
    """The picker would read a name with a comma as two names."""
    return tuple(name for name in names if name and "," not in name)


__all__ = ["CONTENT_TYPE", "EngineReport", "Snapshot", "Stats", "pieces", "process_stats_of", "render", "snapshot"]

Stats = Mapping[int, ProcessStats]  # by process


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine at the moment of a scrape."""

    engine_id: EngineId = FIRST_ENGINE
    is_up: bool = True
    is_given_up: bool = False
    capacity: Capacity | None = None
    pid: int | None = None  # of an engine that has a process of its own
    inspected: Inspected | None = None  # None if the engine did not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one scrape shows. Its histograms and sums may grow by a token while they are written."""

    reports: tuple[EngineReport, ...]
    loaded: int
    connections: ConnectionMeters
    lost: int
    quarantined: int
    slots: tuple[SlotChanged, ...]
    engines: dict[EngineId, EngineMeters]
    adapters: tuple[AdapterMeters, ...]
    keys: tuple[KeyMeters, ...]
    traffic: TrafficMeters
    standings: dict[str, list[AdapterStanding]]  # by label, of all engines
    picker: PickerTotals | None = None


def snapshot(metrics: Metrics, reports: Sequence[EngineReport], wall_at: float | None = None) -> Snapshot:
    """For the thread that moves the meters. With `wall_at`, in seconds since 1970, the picker's metrics are there."""
    adapters = tuple(metrics.adapters)
    standings: dict[str, list[AdapterStanding]] = {one.label: [] for one in adapters}
    inspected = [report.inspected for report in reports if report.inspected]
    for engine in inspected:
        for standing in engine.adapters:
            standings.setdefault(metrics.meters_of(standing.adapter_id).label, []).append(standing)
        if engine.others and OTHER_LABEL in standings:
            standings[OTHER_LABEL].append(engine.others)
    picker = None
    if wall_at is not None:
        capacities = [report.capacity for report in reports if report.capacity]
        picker = picker_totals(metrics, capacities, inspected, wall_at)
    return Snapshot(
        reports=tuple(reports),
        loaded=len(metrics.loaded),
        connections=metrics.connections,
        lost=len(metrics.lost),
        quarantined=metrics.quarantined(),
        slots=tuple(metrics.slots.values()),
        engines=metrics.engines.copy(),
        adapters=adapters,
        keys=tuple(metrics.keys),
        traffic=metrics.traffic,
        standings=standings,
        picker=picker,
    )


def process_stats_of(taken: Snapshot) -> Stats:
    """What the system tells of the server's process and the engines'; for a thread, as it reads files."""
    pids = [os.getpid(), *(report.pid for report in taken.reports if report.pid)]
    return {pid: stats for pid in pids if (stats := process_stats(pid))}


def render(taken: Snapshot) -> bytes:
    """The whole text at once."""
    return "".join(pieces(taken, process_stats_of(taken))).encode()


def pieces(taken: Snapshot, stats: Stats) -> Iterator[str]:
    """The text in pieces, so that between two of them tokens can leave."""
    reports = [((str(report.engine_id),), report) for report in taken.reports]
    yield numbers(table.ENGINE_UP, [(labels, report.is_up) for labels, report in reports])
    yield numbers(table.ENGINE_GIVEN_UP, [(labels, report.is_given_up) for labels, report in reports])
    yield numbers(table.ADAPTERS, [((), taken.loaded)])
    yield from _of_connections(taken.connections)
    yield numbers(table.LOST, [((), taken.lost)])
    yield numbers(table.QUARANTINED, [((), taken.quarantined)])
    yield from _of_processes(taken, stats)
    yield from _of_engines(taken)
    yield from _of_adapters(taken.adapters)
    if taken.keys:
        yield from _of_keys(taken.keys)
    yield from _of_traffic(taken.traffic)
    # Without an engine's answer its own numbers are left out: older numbers may be wrong by now.
    if inspected := [report.inspected for report in taken.reports if report.inspected]:
        yield from _of_inspections(taken, inspected)
    if taken.picker:
        yield from picker_pieces(taken.picker)


def _of_connections(meters: ConnectionMeters) -> Iterator[str]:
    yield numbers(table.CONNECTIONS, [((), meters.open)])
    yield numbers(table.CONNECTIONS_LIMIT, [((), meters.most)])
    yield numbers(table.CONNECTIONS_REFUSED, [((why.value,), number) for why, number in meters.refused.items()])
    yield numbers(table.CONNECTIONS_CLOSED, [((why.value,), number) for why, number in meters.closed.items()])


def _of_engines(taken: Snapshot) -> Iterator[str]:
    engines = [(str(engine_id), engine) for engine_id, engine in taken.engines.items()]
    yield numbers(table.PAUSED, [((id,), one.is_paused) for id, one in engines])
    standstills = [((id, kind), number) for id, one in engines for kind, number in one.standstills.copy().items()]
    yield numbers(table.STANDSTILLS, standstills)
    yield numbers(table.ENGINE_RESTARTS, [((id,), one.restarts) for id, one in engines])
    yield numbers(table.LOSSES, [((id,), one.losses) for id, one in engines])
    yield from histograms(table.STEP_TIME, [((id,), one.step_time) for id, one in engines])
    yield from histograms(table.LOAD_TIME, [((id,), one.load_time) for id, one in engines])
    yield from histograms(table.DELAYER_PASSES, [((id,), one.delay_passes) for id, one in engines])
    yield from histograms(table.DELAYER_WAIT, [((id,), one.delay_wait) for id, one in engines])
    yield numbers(table.COMPUTED_TOKENS, [((id,), one.computed_tokens) for id, one in engines])
    yield numbers(table.ROTATIONS, [((id,), one.rotations) for id, one in engines])
    routes = [((id, reason), number) for id, one in engines for reason, number in one.routes.copy().items()]
    yield numbers(table.ROUTED, routes)
    drains = [((id, state), number) for id, one in engines for state, number in one.drains.copy().items()]
    yield numbers(table.DRAINS, drains)
    delays = [((id, reason), number) for id, one in engines for reason, number in one.delays.copy().items()]
    yield numbers(table.DELAYER_OUTCOMES, delays)


def _of_processes(taken: Snapshot, known: Stats) -> Iterator[str]:
    """The server's own process, and those of the engines that have one; none where the system does not tell."""
    if server := known.get(os.getpid()):
        yield numbers(table.CPU, [((), server.cpu_s)])
        gauges = table.MEMORY, table.FILES, table.MOST_FILES, table.THREADS, table.STARTED
        yield from _of_process(gauges, [((), server)])
    found = [(report, known.get(report.pid) if report.pid else None) for report in taken.reports]
    engines = [((str(report.engine_id),), stats) for report, stats in found if stats]
    if engines:
        yield numbers(table.ENGINE_CPU, [(labels, stats.cpu_s) for labels, stats in engines])
        gauges = (
            table.ENGINE_MEMORY,
            table.ENGINE_FILES,
            table.ENGINE_MOST_FILES,
            table.ENGINE_THREADS,
            table.ENGINE_STARTED,
        )
        yield from _of_process(gauges, engines)


def _of_process(gauges: Sequence[Metric], processes: Sequence[tuple[Labels, ProcessStats]]) -> Iterator[str]:
    values = [
        (labels, (one.resident_bytes, one.open_fds, one.max_fds, one.threads, one.started_at))
        for labels, one in processes
    ]
    for position, gauge in enumerate(gauges):
        yield numbers(gauge, [(labels, of_one[position]) for labels, of_one in values])


def _of_adapters(adapters: Sequence[AdapterMeters]) -> Iterator[str]:
    outcomes = [((one.label, what), number) for one in adapters for what, number in one.outcomes.copy().items()]
    yield numbers(table.REQUESTS, outcomes)
    yield from histograms(table.TTFT, [((one.label,), one.ttft) for one in adapters])
    yield from histograms(table.QUEUE_WAIT, [((one.label,), one.queue_wait) for one in adapters])
    yield from histograms(table.TOKEN_GAP, [((one.label,), one.token_gap) for one in adapters])
    yield from histograms(table.E2E, [((one.label,), one.e2e) for one in adapters])
    yield numbers(table.PROMPT_TOKENS, [((one.label,), one.prompt_tokens) for one in adapters])
    yield numbers(table.CACHED_TOKENS, [((one.label,), one.cached_tokens) for one in adapters])
    yield numbers(table.OUTPUT_TOKENS, [((one.label,), one.output_tokens) for one in adapters])
    yield numbers(table.PREEMPTIONS, [((one.label,), one.preemptions) for one in adapters])
    yield numbers(table.LOADS, [((one.label,), one.loads) for one in adapters])
    yield numbers(table.EVICTIONS, [((one.label,), one.evictions) for one in adapters])


def _of_keys(keys: Sequence[KeyMeters]) -> Iterator[str]:
    outcomes = [((one.label, what), number) for one in keys for what, number in one.outcomes.copy().items()]
    yield numbers(table.KEY_REQUESTS, outcomes)
    yield numbers(table.KEY_OPEN, [((one.label,), one.open) for one in keys])
    yield from histograms(table.KEY_QUEUE_WAIT, [((one.label,), one.queue_wait) for one in keys])
    yield numbers(table.KEY_PROMPT_TOKENS, [((one.label,), one.prompt_tokens) for one in keys])
    yield numbers(table.KEY_OUTPUT_TOKENS, [((one.label,), one.output_tokens) for one in keys])
    limits = [((one.label, limit), number) for one in keys for limit, number in one.limits_met.copy().items()]
    yield numbers(table.KEY_LIMITS, limits)


def _of_traffic(meters: TrafficMeters) -> Iterator[str]:
    targets = meters.targets
    outcomes = [((*one.names, what), number) for one in targets for what, number in one.outcomes.copy().items()]
    yield numbers(table.TARGET_REQUESTS, outcomes)
    yield from histograms(table.TARGET_TTFT, [(one.names, one.ttft) for one in targets])
    yield numbers(table.TARGET_WEIGHT, meters.weights)
    yield numbers(table.ROLLBACKS, [((cause,), number) for cause, number in meters.rollbacks.items()])
    yield numbers(table.SHADOWS, [((what,), number) for what, number in meters.shadows.items()])


def _of_inspections(taken: Snapshot, inspected: Sequence[Inspected]) -> Iterator[str]:
    """The numbers of each engine, and those of each adapter over all engines."""
    by_engine = [((str(one.engine_id),), one) for one in inspected]
    states = {
        one.engine_id: [slot.state for slot in taken.slots if slot.engine_id == one.engine_id] for one in inspected
    }
    yield numbers(table.SLOTS, [(labels, one.slots) for labels, one in by_engine])
    ready, loading = SlotState.READY, SlotState.LOADING
    yield numbers(table.SLOTS_USED, [(labels, states[one.engine_id].count(ready)) for labels, one in by_engine])
    yield numbers(table.SLOTS_LOADING, [(labels, states[one.engine_id].count(loading)) for labels, one in by_engine])
    yield numbers(table.KV_BLOCKS, [(labels, one.blocks) for labels, one in by_engine])
    yield numbers(table.KV_BLOCKS_USED, [(labels, one.blocks_used) for labels, one in by_engine])
    by_label, now = [((label,), standings) for label, standings in taken.standings.items()], inspected[-1].at
    yield numbers(table.WAITING, [(labels, sum(one.waiting for one in ones)) for labels, ones in by_label])
    yield numbers(table.RUNNING, [(labels, sum(one.running for one in ones)) for labels, ones in by_label])
    yield numbers(table.PARKED, [(labels, sum(one.parked for one in ones)) for labels, ones in by_label])
    yield numbers(table.OLDEST_WAIT, [(labels, _oldest_wait_s(ones, now)) for labels, ones in by_label])


def _oldest_wait_s(standings: list[AdapterStanding], now: float) -> float:
    return max((now - one.oldest_at for one in standings if one.oldest_at is not None), default=0.0)
