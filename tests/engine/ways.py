"""Ways through an engine: alone or beside others, in chunks, preempted, from a cached prefix, one or two steps deep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rota.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Finished
from rota.core.ids import RequestId
from rota.core.request import Request
from rota.engine.build import build_engine
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.runtime.offline import OfflineInbox
from rota.scheduler import Scheduler
from tests.builders import request
from tests.scheduler.balance import check_balance
from tests.worlds import outputs

NEW_TOKENS = 32


@dataclass(frozen=True)
class Way:
    """How requests travel through the engine."""

    rows: int = 8
    chunk: int = 2048
    kv_blocks: int = 256
    depth: int = 1
    repeats: int = 1


WAYS = {
    "alone": Way(rows=1),
    "batched": Way(),
    "chunked": Way(rows=4, chunk=7),
    "preempted": Way(kv_blocks=24),
    "cached prefix": Way(repeats=2),
    "depth 2": Way(depth=2),
    "depth 2, chunked, preempted": Way(rows=4, chunk=7, kv_blocks=16, depth=2),
}


def serve(
    folder: Path,
    prompts: list[tuple[int, ...]],
    way: Way,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    new_tokens: int = NEW_TOKENS,
    **sampling: Any,
) -> tuple[list[list[int]], list[Event]]:
    """Answers to all prompts, greedy unless asked otherwise; with repeats, those of the last round."""
    scheduler_config = SchedulerConfig(max_running_requests=way.rows, chunked_prefill_size=way.chunk)
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="float32", device="cpu", cpu_threads=1),
            cache=CacheConfig(kv_block_size=8, kv_blocks=way.kv_blocks, kv_cache_dtype=kv_cache_dtype),
            scheduler=scheduler_config,
            quiet=True,
        )
    )
    scheduler = Scheduler(scheduler_config, engine.capacity)
    events: list[Event] = []
    for _ in range(way.repeats):
        events = []
        asked: list[Request] = [
            request(f"r{i}", prompt=prompt, max_new_tokens=new_tokens, arrived_at=float(i), **sampling)
            for i, prompt in enumerate(prompts)
        ]
        inbox = OfflineInbox(asked, max_open=100)

        def emit(batch: list[Event], inbox: OfflineInbox = inbox, events: list[Event] = events) -> None:
            events.extend(batch)
            for event in batch:
                if isinstance(event, Finished):
                    inbox.note_ended(event.request_id)

        run(scheduler, LiveWorld(engine, inbox), emit, way.depth)
        check_balance(scheduler)
    given = outputs(events)
    return [given[RequestId(f"r{i}")] for i in range(len(prompts))], events
