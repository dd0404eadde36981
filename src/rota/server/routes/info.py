"""What clients, platforms and operators ask of a server: its models, whether it is ready, and how it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from pydantic import BaseModel

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Inspected
from rota.core.stages import Stage, total_s
from rota.core.version import __version__
from rota.extensions import found
from rota.observe.metrics import Metrics
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.access.disclosure import path_for, reason_for
from rota.server.access.keys import Key
from rota.server.context import AppContext
from rota.server.queries import PAUSED
from rota.server.route import list_response
from rota.server.routes.operators import quarantine_body

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# GET /v1/models lists the models that a request may name, the base model first.


# When this process began to serve: no model has an age that a client could use.
_CREATED = int(time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBody:
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int = _CREATED
    owned_by: str = "rota"
    root: str
    parent: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ModelsBody:
    """The base model, then its adapters."""

    object: Literal["list"]
    data: list[ModelBody]


async def models(context: AppContext, http: HttpRequest) -> Response:
    """The values of `model`: the base model first, then its adapters. A key sees only what it may use.

    `root` is the model's folder for operators, and the model's name for other keys.
    """
    key = context.access.key_of(http)
    return await list_response('{"object":"list","data":', _shown(context, key, context.access.visible(key)))


async def model(context: AppContext, name: str, http: HttpRequest) -> ModelBody:
    """One model."""
    key = context.access.key_of(http)
    return next(_shown(context, key, [context.access.find(key, name)]))


def _shown(context: AppContext, key: Key, found: Iterable[Adapter]) -> Iterator[ModelBody]:
    base, capacity = context.registry.base, context.service.state.capacity
    longest = capacity.max_sequence_tokens if capacity else None
    for one in found:
        parent = None if one is base else base.name
        yield ModelBody(id=one.name, root=path_for(key, one), parent=parent, max_model_len=longest)


# ── probes ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Probes tell a platform whether to keep this process, and whether to send it requests.

# Stands in the place of the service's phase while every engine that serves stands still for ever.
STUCK = "stuck"


def _probed(context: AppContext, good: Callable[[str], bool]) -> Response:
    state = context.service.state
    is_paused = state.phase is ServicePhase.READY and context.pausing.paused_at is not None
    status = PAUSED if is_paused else STUCK if _is_stuck(state) else state.phase.value
    reason = " ".join([*filter(None, [state.reason]), *_standstills(state)])
    body = {"status": status} | ({"reason": reason_for(context.access.for_probes, reason)} if reason else {})
    return JSONResponse(body, 200 if good(status) else 503)


async def healthy(context: AppContext) -> Response:
    """200 while the engine serves, also while the server is paused. 503 at the start, while the server stops, and
    while the engine is stuck or down."""
    return _probed(context, lambda status: status in (ServicePhase.READY, PAUSED))


async def ready(context: AppContext) -> Response:
    """200 while requests are answered, or wait for a slow disk. 503 otherwise, also while the server is paused."""
    return _probed(context, lambda status: status == ServicePhase.READY)


async def live(context: AppContext) -> Response:
    """200 while the process lives, also while its engine starts again. 503 once the engine stays down."""
    return _probed(context, lambda status: status != ServicePhase.DOWN)


def _is_stuck(state: ServiceState) -> bool:
    serving = [one.standstill for one in state.engines if one.phase is ServicePhase.READY]
    return (
        state.phase is ServicePhase.READY and bool(serving) and all(one is not None and one.is_stuck for one in serving)
    )


def _standstills(state: ServiceState) -> list[str]:
    now = time.monotonic()
    return [f"Engine {one.engine_id}: {one.standstill.sentence(now)}" for one in state.engines if one.standstill]


async def root(_: AppContext, http: HttpRequest) -> Response:
    """A browser is sent to the dashboard. All others read what Ollama's clients look for here."""
    if "text/html" in http.headers.get("accept", "") and found("dashboard"):
        return RedirectResponse("dashboard")
    return PlainTextResponse("Ollama is running")


async def version(_: AppContext) -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}


async def load(context: AppContext) -> dict[str, int]:
    """How many calls are open, in vLLM's shape."""
    return {"server_load": sum(1 for _ in context.answers)}


# ── vllm config ─────────────────────────────────────────────────────────────────────────────────────────────────────
# What vLLM's clients read of a server's config, in vLLM's names.


def vllm_config(base: Adapter, capacity: Capacity | None) -> dict[str, Any]:
    """Raises RequestError while no engine serves: what is written here is what an engine found.

    A client takes one replica for the server: `data_parallel_size` is 1, because an adapter that is loaded here
    reaches all replicas, which vLLM's does not.
    """
    if capacity is None:
        raise RequestError(Fault(FaultCode.ENGINE_DIED, "No engine serves yet, so its config is not known."))
    return {
        "model_config": {
            "model": base.path,
            "served_model_name": base.name,
            "dtype": f"torch.{capacity.dtype}" if capacity.dtype else None,
            "max_model_len": capacity.max_sequence_tokens,
        },
        "parallel_config": {
            "tensor_parallel_size": capacity.ranks,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": capacity.ranks,
        },
        "scheduler_config": {"max_num_seqs": capacity.rows},
        "cache_config": {"block_size": capacity.block_size, "cache_dtype": capacity.kv_dtype},
        "lora_config": {"max_lora_rank": capacity.slot_rank, "max_loras": capacity.slots} if capacity.slots else None,
    }


# ── server info ─────────────────────────────────────────────────────────────────────────────────────────────────────
# GET /server_info shows the server's capacity, its adapters, and each of its engines.


class ServerInfoBody(BaseModel):
    """The server's version, its capacity and its present state."""

    version: str
    status: str
    model_path: str
    served_model_name: str
    context_length: int | None
    tensor_parallel_size: int | None
    max_running_requests: int | None
    max_total_num_tokens: int | None
    kv_block_size: int | None
    # As torch names it: the model's, or float8_e4m3fn.
    kv_cache_dtype: str | None
    max_loras_per_batch: int | None
    # What the slots take on the device, in use or not.
    lora_memory_bytes: int | None
    # The places for adapters at the start: how many, of which rank, why, how many pages of eight ranks they share (0:
    # each has a place of its own), and the sites where A lie below the model's matrices. `warning`: they are too few.
    slots: dict[str, Any] | None
    loaded_adapters: dict[str, str]
    # The adapters that engines died of, and the keys that may load nothing for that.
    quarantine: dict[str, Any]
    # SGLang's name for the requests, blocks, open slots and pages of each engine, as they are now.
    internal_states: list[dict[str, Any]]
    # Each engine: its phase and process, its capacity, the adapters in its slots, its start and last restart, its
    # requests.
    replicas: list[dict[str, Any]]
    # With config_format=json: the model, its dtype, devices and adapters in vLLM's names.
    vllm_config: dict[str, Any] | None = None


async def server_info(context: AppContext, config_format: Literal["json"] | None = None) -> dict[str, Any]:
    """The server's capacity, its adapters and its engines. Counts of requests are `age_s` seconds old.

    With `config_format=json` also `vllm_config`, what vLLM's clients read of a config.
    """
    standings = await context.queries.inspect_or_recall()
    state = context.service.state
    return {
        "version": __version__,
        "status": state.phase.value if context.pausing.paused_at is None else PAUSED,
        **_capacity(context, state, standings),
        **({"vllm_config": vllm_config(context.registry.base, state.capacity)} if config_format else {}),
        "loaded_adapters": {adapter.name: adapter.path for adapter in context.registry.adapters},
        "quarantine": quarantine_body(context.access.blame),
        "internal_states": [_described(standing) for standing in standings],
        "replicas": [_replica(engine, context.metrics, standings) for engine in state.engines],
    }


def _capacity(context: AppContext, state: ServiceState, standings: Sequence[Inspected]) -> dict[str, Any]:
    """Rows and KV are those of all engines that serve; the rest is the same on each, or the largest."""
    base, capacity = context.registry.base, state.capacity
    found = [engine.capacity for engine in state.engines if engine.capacity]
    slot_bytes = max([one.adapter_bytes for one in found] + [one.slot_bytes for one in standings], default=None)
    return {
        "model_path": base.path,
        "served_model_name": base.name,
        "context_length": capacity and capacity.max_sequence_tokens,
        "tensor_parallel_size": capacity and capacity.ranks,
        "max_running_requests": capacity and sum(one.rows for one in found),
        "max_total_num_tokens": capacity and sum(one.blocks * one.block_size for one in found),
        "kv_block_size": capacity and capacity.block_size,
        "kv_cache_dtype": capacity and capacity.kv_dtype,
        "max_loras_per_batch": capacity and capacity.slots,
        "lora_memory_bytes": capacity and slot_bytes,
        "slots": capacity and {**_slots(capacity), "bytes": slot_bytes, "warning": _warning(context)},
    }


def _slots(capacity: Capacity) -> dict[str, Any]:
    """The places for adapters on the device, as they were at the start. What is in them is told of each engine."""
    return {
        "count": capacity.slots,
        "from": capacity.slots_from,
        "rank": capacity.slot_rank,
        "rank_from": capacity.rank_from,
        "pages": capacity.pages,
        "matrices": capacity.matrices,
        "annexed": capacity.fused_lora_a,
    }


def _warning(context: AppContext) -> str | None:
    """That slots are too few, of the engine where adapters wait longest for one."""
    found = context.pressure.shortages(time.monotonic()).values()
    return str(max(found, key=lambda one: one.wait_s)) if found else None


def _described(standing: Inspected) -> dict[str, Any]:
    """Sums over all adapters; /metrics has each one. During a long step these are the last known values."""
    return {
        "age_s": round(max(0.0, time.monotonic() - standing.at), 3),
        "steps": standing.steps,
        "num_running_reqs": sum(one.running for one in standing.adapters),
        "num_waiting_reqs": sum(one.waiting for one in standing.adapters),
        "num_parked_reqs": sum(one.parked for one in standing.adapters),
        "kv_blocks": standing.blocks,
        "kv_blocks_used": standing.blocks_used,
        "slots_open": standing.slots,
        "slot_pages": standing.pages,
        "slot_pages_used": standing.pages_used,
        "slot_bytes": standing.slot_bytes,
    }


def _start(stages: Sequence[Stage]) -> dict[str, Any] | None:
    """How long a start took, counted from the beginning of the engine's process; None if there was none."""
    if not stages:
        return None
    parts = [{"name": one.name, "began_s": round(one.began_s, 2), "seconds": round(one.took_s, 2)} for one in stages]
    return {"seconds": round(total_s(stages), 2), "stages": parts}


def _replica(engine: ServiceState, metrics: Metrics, standings: Sequence[Inspected]) -> dict[str, Any]:
    capacity = engine.capacity
    standing = next((one for one in standings if one.engine_id == engine.engine_id), None)
    return {
        "engine": engine.engine_id,
        "status": engine.phase.value,
        "reason": engine.reason or None,
        "pid": engine.engine_pid,
        "max_running_requests": capacity and capacity.rows,
        "max_total_num_tokens": capacity and capacity.blocks * capacity.block_size,
        "max_loras_per_batch": capacity and capacity.slots,
        "adapters_in_slots": metrics.in_slots(engine.engine_id),
        "start": _start(engine.start),
        "restart": _start(engine.restart),
        **(_described(standing) if standing else {}),
    }


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# GET /metrics gives the metrics to Prometheus, and to the endpoint picker of Kubernetes.


async def scrape(context: AppContext) -> Response:
    """All metrics in Prometheus' text format. While the engine is down, the engine's own metrics are missing."""
    return await context.scrapes.answer()
