"""An engine and its scheduler without a server, for tests that compare the answers of many adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from rota.core.adapter import Adapter
from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request
from rota.engine.build import build_engine
from rota.engine.choices import choose
from rota.engine.engine import Engine
from rota.engine.quantised.maker import MatrixMaker
from rota.runtime.doorbell import Doorbell
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.offline import OfflineInbox
from tests.scheduler.balance import check_balance


class Server:
    """Engine and books, kept over several runs."""

    def __init__(
        self,
        folder: Path,
        slots: int | Literal["auto"],
        *,
        first: FirstAdapters | None = None,
        chunk: int = 2048,
        policy: str = "rotate",
        overlaps: bool = True,
        depth: Literal[1, 2] = 2,
        turn_ms: float = 5.0,
        max_open: int = 100,
        maker: MatrixMaker | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        self._max_open = max_open
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), dtype="float32", device=device),
            cache=CacheConfig(kv_block_size=8, kv_blocks=512),
            scheduler=SchedulerConfig(max_running_requests=16, chunked_prefill_size=chunk, overlap_depth=depth),
            lora=LoraConfig(max_loras_per_batch=slots, enable_lora_overlap_loading=overlaps),
            policy=PolicyConfig(
                lora_policy=policy,
                lora_rotation_quantum_ms=turn_ms,
                lora_max_stall_ms=2 * turn_ms,
                lora_drain_wait_threshold=0.001,
            ),
            first=first or FirstAdapters(),
            quiet=True,
        )
        choices = choose(self.config)
        self.engine: Engine = build_engine(self.config, choices=replace(choices, maker=maker or choices.maker))
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()

    def add(self, *adapters: Adapter) -> list[Event]:
        return self._run(OfflineInbox(adapters=adapters, doorbell=self.doorbell))

    def serve(self, asked: list[Request]) -> list[Event]:
        return self._run(OfflineInbox(asked, max_open=self._max_open, doorbell=self.doorbell))

    def _run(self, inbox: OfflineInbox) -> list[Event]:
        events: list[Event] = []

        def emit(batch: list[Event]) -> None:
            check_balance(self.scheduler)
            events.extend(batch)
            for event in batch:
                if isinstance(event, Finished):
                    inbox.note_ended(event.request_id)
                elif isinstance(event, AdapterAdded | AdapterRefused):
                    inbox.note_ended(event.adapter_id)

        run(self.scheduler, LiveWorld(self.engine, inbox), emit, self.config.scheduler.overlap_depth)
        return events


def adapter(number: int, folder: Path) -> Adapter:
    return Adapter(adapter_id=AdapterId(number), name=f"adapter{number}", path=str(folder / str(number)))
