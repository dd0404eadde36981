"""All metrics stand in one table, in the order of `/metrics` and of `docs/metrics.md`.

Most are fields of the records that they are read of (`observe/meters.py`, `observe/snapshot.py`). Those of records that
also serve others are written here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rota.core.events import SlotState
from rota.observe.meters import (
    AdapterMeters,
    ConnectionMeters,
    EngineMeters,
    KeyMeters,
    TargetMeters,
    TrafficMeters,
)
from rota.observe.metric import Labels, Metric, metrics_of
from rota.observe.snapshot import EngineReport, ProcessStats, Snapshot, StandingSums

Row = tuple[Labels, Any]  # a record and the values of its labels


class MetricGroup:
    """Metrics that are read of the same records: one for each engine, each adapter, each key."""

    def __init__(
        self,
        labels: Labels,
        rows: Callable[[Snapshot], Sequence[Row] | None],
        *metrics: Metric,
        is_asked: bool = False,
    ) -> None:
        """`rows` gives the records of a snapshot; None: the whole group is left out."""
        self.rows = rows
        self.metrics = tuple(
            replace(one, labels=(*labels, one.by) if one.by else labels, is_asked=is_asked) for one in metrics
        )


def _gauge(name: str, sentence: str, read: Callable[[Any], float]) -> Metric:
    return Metric(kind="gauge", name=name, sentence=sentence, read=read)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────
# The server's own process has the names that every Prometheus client gives, and so without our own beginning.


def _process_metrics(prefix: str, **words: str) -> list[Metric]:
    """The metrics of a process, with words for those in braces."""
    return [
        replace(one, name=f"{prefix}_{one.name}", sentence=one.sentence.format(**words))
        for one in metrics_of(ProcessStats)
    ]


def _server_process(taken: Snapshot) -> list[Row] | None:
    """None where the system does not tell."""
    stats = taken.stats.get(os.getpid())
    return [((), stats)] if stats else None


def _engine_processes(taken: Snapshot) -> list[Row] | None:
    """Of engines that have a process of their own."""
    found = [(report, taken.stats.get(report.pid)) for report in taken.reports if report.pid]
    return [((str(report.engine_id),), stats) for report, stats in found if stats] or None


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _engines_slots(taken: Snapshot) -> list[Row] | None:
    """Of each engine that answered, its answer and the states of its slots."""
    return [((str(one.engine_id),), (one, taken.slot_states(one.engine_id))) for one in taken.inspected] or None


def _shortages(taken: Snapshot) -> list[Row]:
    """Of each engine, the shortage of its slots, or None."""
    found = taken.metrics.shortages()
    return [((str(engine_id),), found.get(engine_id)) for engine_id in taken.metrics.engines]


def _open_requests(taken: Snapshot) -> list[Row] | None:
    return [((label,), one) for label, one in taken.open_requests().items()] if taken.inspected else None


GROUPS = (
    MetricGroup(
        ("engine",), lambda taken: [((str(one.engine_id),), one) for one in taken.reports], *metrics_of(EngineReport)
    ),
    MetricGroup(
        (),
        lambda taken: [((), taken.metrics)],
        _gauge("rota_adapters_loaded", "Adapters that requests may ask for.", lambda one: len(one.loaded)),
    ),
    MetricGroup((), lambda taken: [((), taken.metrics.connections)], *metrics_of(ConnectionMeters)),
    MetricGroup(
        (),
        lambda taken: [((), taken.metrics)],
        _gauge(
            "rota_adapters_lost",
            "Adapters that could not be read after the start or a restart.",
            lambda one: len(one.lost),
        ),
        _gauge(
            "rota_adapters_quarantined",
            "Adapters that are not served because engines died of them.",
            lambda one: one.quarantined(),
        ),
    ),
    MetricGroup(
        (), _server_process, *_process_metrics("process", whose="server's", files="Open files and connections")
    ),
    MetricGroup(
        ("engine",), _engine_processes, *_process_metrics("rota_engine_process", whose="engine's", files="Open files")
    ),
    MetricGroup(
        ("engine",),
        lambda taken: [((str(id),), one) for id, one in taken.metrics.engines.items()],
        *metrics_of(EngineMeters),
    ),
    MetricGroup(
        ("engine",),
        _shortages,
        _gauge(
            "rota_slots_short",
            "Busy adapters beyond the slots while they wait long for one; 0: the slots are enough.",
            lambda one: one.busy - one.slots if one else 0.0,
        ),
    ),
    MetricGroup(
        ("adapter",),
        lambda taken: [((one.label,), one) for one in taken.metrics.adapters.shown],
        *metrics_of(AdapterMeters),
    ),
    # A server without keys has no such metrics.
    MetricGroup(
        ("key",),
        lambda taken: [((one.label,), one) for one in taken.metrics.keys.shown] or None,
        *metrics_of(KeyMeters),
    ),
    MetricGroup(
        ("adapter", "target"),
        lambda taken: [(one.names, one) for one in taken.metrics.traffic.targets.shown],
        *metrics_of(TargetMeters),
    ),
    MetricGroup(
        ("adapter", "target"),
        lambda taken: taken.metrics.traffic.weights,
        _gauge("rota_target_weight", "The share of an adapter's requests that a target gets.", float),
    ),
    MetricGroup((), lambda taken: [((), taken.metrics.traffic)], *metrics_of(TrafficMeters)),
    MetricGroup(
        ("engine",),
        _engines_slots,
        _gauge("rota_slots", "Adapters that a step may hold.", lambda one: one[0].slots),
        _gauge("rota_slots_used", "Adapters that are ready in a slot.", lambda one: one[1].count(SlotState.READY)),
        _gauge("rota_slots_loading", "Adapters on their way into a slot.", lambda one: one[1].count(SlotState.LOADING)),
        _gauge(
            "rota_promisable_pause_seconds",
            "The shortest pause of an answer that `--lora-max-stall-ms` could promise now, by slots, copies and KV; 0 "
            "under policies without turns.",
            lambda one: one[0].promisable_s,
        ),
        _gauge("rota_kv_blocks", "KV blocks of the cache.", lambda one: one[0].blocks),
        _gauge("rota_kv_blocks_used", "KV blocks that requests hold.", lambda one: one[0].blocks_used),
        is_asked=True,
    ),
    MetricGroup(("adapter",), _open_requests, *metrics_of(StandingSums), is_asked=True),
)
METRICS = tuple(metric for group in GROUPS for metric in group.metrics)


# ── for the endpoint picker ─────────────────────────────────────────────────────────────────────────────────────────
# Totals over all engines, under the names that the endpoint picker of Kubernetes reads without configuration.
#
# The names are vLLM's. The rules are the model server protocol of the Gateway API Inference Extension.


def _total(taken: Snapshot) -> list[Row] | None:
    """Over all engines that answered, the requests and the part of the KV blocks that is in use."""
    if not taken.inspected:
        return None
    total = StandingSums()
    for engine in taken.inspected:
        for one in (*engine.adapters, *filter(None, [engine.others])):
            total.add(one, engine.at)
    blocks = sum(one.blocks for one in taken.inspected)
    return [((), (total, sum(one.blocks_used for one in taken.inspected) / max(blocks, 1)))]


def _cache(taken: Snapshot) -> list[Row] | None:
    found = taken.capacities
    return [((str(found[0].block_size), str(sum(one.blocks for one in found))), 1)] if found else None


def _adapters(taken: Snapshot) -> list[Row] | None:
    found = taken.capacities
    slots = str(sum(one.slots for one in found))
    return [((slots, *taken.ready_and_waiting()), taken.wall_at)] if found else None


PICKER_GROUPS = (
    MetricGroup(
        (),
        _total,
        _gauge(
            "vllm:num_requests_waiting",
            "Requests that wait: in the queue, or parked.",
            lambda one: one[0].waiting + one[0].parked,
        ),
        _gauge("vllm:num_requests_running", "Requests that take part in steps.", lambda one: one[0].running),
        _gauge(
            "vllm:kv_cache_usage_perc",
            "The part of all KV blocks that requests hold, from 0 to 1.",
            lambda one: one[1],
        ),
    ),
    MetricGroup(
        ("block_size", "num_gpu_blocks"),
        _cache,
        _gauge("vllm:cache_config_info", "Always 1; the labels are the size of KV blocks and their number.", float),
    ),
    MetricGroup(
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        _adapters,
        _gauge(
            "vllm:lora_requests_info",
            "When this was written, in seconds since 1970; the labels are how many adapters the slots hold, the "
            "adapters that are ready in a slot, and those that wait for one.",
            float,
        ),
    ),
)
PICKER_METRICS = tuple(metric for group in PICKER_GROUPS for metric in group.metrics)
