"""The engines of a server: one, or as many replicas as there are to be copies of the model, here or on a cluster."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rota.commands.logged import MakeDevice, build_logged
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig, ModelConfig, ServerConfig
from rota.core.ids import EngineId
from rota.core.policy_config import PolicyConfig
from rota.core.stages import Stage, described, stage_fields, total_s
from rota.extensions import needed
from rota.llm.config import import_device
from rota.policy.visits import least_promise_s, promised_turn_s
from rota.runtime.blame import Blame
from rota.runtime.lifeline import tied
from rota.runtime.process import EngineProcess
from rota.runtime.service import Service, ServiceState
from rota.runtime.spares import Spares
from rota.runtime.supervisor import AdapterLook, SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from rota.start import START

LOG = logging.getLogger("rota.start")
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def engine_service(
    config: EngineConfig,
    server: ServerConfig,
    make_device: MakeDevice,
    first: AdapterLook | None = None,
    blame: Blame | None = None,
) -> Service:
    """The service of a server, each engine in a process of its own. `first` is what the config lacks."""
    blame = blame or Blame()
    if config.model.data_parallel_backend == "ray":
        cluster = needed("cluster", "--data-parallel-backend ray")
        return cluster.ray_service(config, server, partial(build_logged, make_device), first=first, blame=blame)
    timeouts = EngineTimeouts(silence_s=server.engine_silence_s)
    new_engine = partial(EngineProcess, spares=Spares(partial(spare_imports, server.spare_engine)))
    engines = [
        SupervisedService(partial(build_logged, make_device, one, server), one, timeouts, new_engine, first, blame)
        for one in replica_configs(config)
    ]
    if len(engines) == 1:
        return engines[0]
    replicas = needed("replicas", "--data-parallel-size")
    router = replicas.Router(len(engines), has_prefix_cache=config.scheduler.enable_prefix_caching)
    return replicas.ReplicatedService(engines, router)


def spare_imports(asked: str, capacity: Capacity) -> Callable[[], None] | None:
    """What the spare for an engine imports; None if it has none. On a CPU a restart is short, and memory scarce."""
    is_kept = asked == "on" or (asked == "auto" and capacity.device == "cuda")
    return partial(import_device, capacity.device) if is_kept else None


def counted(config: EngineConfig) -> EngineConfig:
    """The same config with the number of replicas on this machine. How many a cluster holds is counted there."""
    if config.model.data_parallel_size != "auto" or config.model.data_parallel_backend == "ray":
        return config
    return replace(config, model=replace(config.model, data_parallel_size=_fitting(config.model)))


def _fitting(config: ModelConfig) -> int:
    """As many replicas as the GPUs of this machine hold, and one on a CPU."""
    if config.device == "cpu":
        return 1
    # In a process of its own: the server's own process does without torch.
    command = [sys.executable, "-c", _COUNT_GPUS]
    counted = subprocess.run(tied(command), stdout=subprocess.PIPE, text=True, check=True)
    return max(1, int(counted.stdout) // config.tensor_parallel_size)


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """The config of each replica: its number, and the first of its devices."""
    size = config.model.tensor_parallel_size
    return [
        replace(
            config,
            engine_id=EngineId(number),
            device_number=config.device_number + number * size,
            quiet=config.quiet or number > 0,  # progress bars of several processes would overwrite each other
        )
        for number in range(config.model.replicas)
    ]


def described_replicas(state: ServiceState) -> str:
    """How many copies of the model serve; empty if there is one."""
    replicas = len(state.engines)
    return f"{replicas} replicas of the model share the requests." if replicas > 1 else ""


# ── announcement ────────────────────────────────────────────────────────────────────────────────────────────────────
# What a server says when it is ready: its address, what it has, and how long its start took.


def announce(
    name: str, url: str, state: ServiceState, policy: PolicyConfig, others: Sequence[str], is_logged: bool
) -> None:
    """Print the sentences, `others` last. If logged, a log line says the time of the start too."""
    took_s = time.monotonic() - START.began_at()
    stages = max((engine.start for engine in state.engines), key=total_s)  # of the slowest engine
    if is_logged:
        fields = {**stage_fields(stages), "seconds": round(took_s, 1)}
        LOG.info("The server is ready.", extra={"fields": fields})
    promised = promise(policy, state.capacity)
    sentences = (ready(took_s, stages), adapter_memory(state.capacity), promised, described_replicas(state), *others)
    print("\n".join([f"Rota serves {name} at {url}", *filter(None, sentences)]), flush=True)


def ready(took_s: float, stages: Sequence[Stage]) -> str:
    """How long the start took, and what of it took how long in the engine's process."""
    return f"Ready after {took_s:.1f} s" + (f": {described(stages)}." if stages else ".")


def promise(policy: PolicyConfig, capacity: Capacity | None) -> str:
    """Whether the longest pause that is promised can be kept, where a step was timed at the start; empty if it can."""
    asked_ms, step_s = policy.lora_max_stall_ms, capacity.decode_s if capacity else 0.0
    turn_s = policy.lora_rotation_quantum_ms and policy.lora_rotation_quantum_ms / 1000.0
    least_ms = round(1000.0 * least_promise_s(step_s, turn_s=turn_s))
    if asked_ms is None or not step_s or asked_ms >= least_ms:
        return ""
    return (
        f"lora_max_stall_ms promises that no answer pauses for more than {asked_ms:g} ms, which cannot be kept: a step "
        f"takes {1000.0 * step_s:,.1f} ms here and a turn {1000.0 * promised_turn_s(turn_s, step_s):,.1f} ms, and a "
        f"change of adapters comes on top. {least_ms:,} ms can be promised."
    )


def adapter_memory(capacity: Capacity | None) -> str:
    """What the slots cost and why, in words; empty if they cost nothing."""
    if capacity is None or not capacity.adapter_bytes:
        return ""
    slots, takes = ("One slot", "takes") if capacity.slots == 1 else (f"{capacity.slots} slots", "take")
    found = (
        f"{slots} for adapters up to rank {capacity.slot_rank} {takes} {capacity.adapter_bytes / 1e6:,.0f} MB on the "
        f"device (slots: {capacity.slots_from}; rank: {capacity.rank_from})."
    )
    below = (
        f" Their A lie below the model's matrices at {', '.join(capacity.fused_lora_a)}."
        if capacity.fused_lora_a
        else ""
    )
    return found + below
