"""An announcement is what a server says when it is ready: its address, what it has, and how long its start took."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from rota.commands.engines import described_replicas
from rota.core.capacity import Capacity
from rota.core.stages import Stage, described, stage_fields, total_s
from rota.runtime.service import ServiceState
from rota.start import START

LOG = logging.getLogger("rota.start")


def announce(name: str, url: str, state: ServiceState, others: Sequence[str], is_logged: bool) -> None:
    """Print the sentences, `others` last. If logged, a log line says the time of the start too."""
    took_s = time.monotonic() - START.began_at()
    stages = max((engine.start for engine in state.engines), key=total_s)  # of the slowest engine
    if is_logged:
        fields = {**stage_fields(stages), "seconds": round(took_s, 1)}
        LOG.info("The server is ready.", extra={"fields": fields})
    sentences = (ready(took_s, stages), adapter_memory(state.capacity), described_replicas(state), *others)
    print("\n".join([f"Rota serves {name} at {url}", *filter(None, sentences)]), flush=True)


def ready(took_s: float, stages: Sequence[Stage]) -> str:
    """How long the start took, and what of it took how long in the engine's process."""
    return f"Ready after {took_s:.1f} s" + (f": {described(stages)}." if stages else ".")


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
