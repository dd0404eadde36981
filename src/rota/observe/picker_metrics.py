"""Picker metrics are totals under the names that the endpoint picker of Kubernetes reads without configuration.

The names are vLLM's. The rules are the model server protocol of the Gateway API Inference Extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rota.core.capacity import Capacity
from rota.core.events import AdapterStanding, Inspected, SlotState
from rota.observe.metric_table import Metric
from rota.observe.metrics import Metrics
from rota.observe.text_format import numbers


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
