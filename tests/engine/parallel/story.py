"""One busy story for any group of ranks: adapters that take turns, preemptions, chunks, and every way to sample."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rota.core.config import CacheConfig, EngineConfig, FirstAdapters, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Finished, Preempted, Produced, PromptsScored, SlotChanged, SlotReason
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row
from rota.core.plan import Chunk, Seat, TokenLogprobs
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.lora.mixed_server import Server, adapter
from tests.engine.parallel.ranks import Ranks
from tests.worlds import outputs

ADAPTERS = 3
PROMPT = tuple(range(5, 15))
GREEDY = SamplingParams(temperature=0.0)
# By the beginning of a request's name; and which adapters are asked so, 0 being the base model.
WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "greedy": ({}, (0, 1, 2, 3)),
    "penalised": ({"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logprobs": 2}, (1, 2)),
    "scored": ({"prompt_logprobs": 2}, (0, 3)),
    "drawn": ({"temperature": 1.2, "top_p": 0.9, "seed": 11}, (1, 3)),
    "all of it": ({"temperature": 0.8, "top_k": 40, "seed": 3, "presence_penalty": 1.0, "logprobs": 1}, (0, 2)),
}


class GroupServer(Server):
    """Scheduler and loop around the ranks of a group, or around one engine in this process."""

    def __init__(
        self,
        folder: Path | None,
        ranks: Ranks | None,
        kv_blocks: int = 13,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        first: FirstAdapters | None = None,
        **model: Any,
    ) -> None:
        self._max_open = 100
        config = self.config_of(folder, kv_blocks, **model)
        cache = replace(config.cache, kv_cache_dtype=kv_cache_dtype)
        self.config = replace(config, cache=cache, first=first or config.first)
        device: Any = build_engine(self.config) if ranks is None else ranks.build(self.config)
        self.engine = device
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()

    @staticmethod
    def config_of(folder: Path | None, kv_blocks: int = 13, **model: Any) -> EngineConfig:
        """Two slots, few rows and blocks, short chunks, and turns that are over at once."""
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", **model}
        return EngineConfig(
            model=ModelConfig(model_path=str(folder) if folder else None, **fields),
            cache=CacheConfig(kv_block_size=8, kv_blocks=kv_blocks),
            scheduler=SchedulerConfig(max_running_requests=6, chunked_prefill_size=20, enable_prefix_caching=False),
            lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=8),
            policy=PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=0.001, lora_max_stall_ms=0.002),
            quiet=True,
        )


# One adapter takes another's slot. On a busy machine requests may end before a turn does, and leave an idle resident.
CHANGES = (SlotReason.TURN_OVER, SlotReason.RESIDENT_IDLE)


@dataclass
class Told:
    """What a story's requests were told."""

    tokens: dict[RequestId, list[int]]
    logprobs: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    scores: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    preemptions: int = 0
    turns: int = 0
    failures: int = 0


def asked(new_tokens: int) -> list[Request]:
    """Every way to sample, with and without adapters."""
    return [
        request(f"{way}-{number}", prompt=5 + 9 * place, max_new_tokens=new_tokens, adapter=AdapterId(number), **fields)
        for place, (way, (fields, numbers)) in enumerate(WAYS.items())
        for number in numbers
    ]


def play(server: GroupServer, adapters: Path, requests: list[Request]) -> Told:
    server.add(*(adapter(number, adapters) for number in range(1, ADAPTERS + 1)))
    events = server.serve(requests)
    server.engine.close()
    return told(events)


def told(events: list[Event]) -> Told:
    all_told = Told(outputs(events))
    for event in events:
        if isinstance(event, Produced):
            for position, one in event.logprobs:
                all_told.logprobs.setdefault(event.request_ids[position], []).append(one)
        elif isinstance(event, PromptsScored):
            for id, scores in zip(event.request_ids, event.scores, strict=True):
                all_told.scores.setdefault(id, []).extend(scores)
    all_told.preemptions = sum(isinstance(event, Preempted) for event in events)
    all_told.turns = sum(isinstance(event, SlotChanged) and event.reason in CHANGES for event in events)
    all_told.failures = sum(isinstance(event, Finished) and event.fault is not None for event in events)
    return all_told


def prompt_of(row: int, number: int = BASE, sampling: SamplingParams = GREEDY) -> tuple[Seat, Chunk]:
    """A sequence for a row, and the chunk that computes its prompt; each row has two blocks of its own."""
    seat = Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=AdapterId(number),
        tokens=PROMPT,
        prompt_length=len(PROMPT),
        blocks=(BlockId(2 * row), BlockId(2 * row + 1)),
        sampling=sampling,
    )
    return seat, Chunk(row=Row(row), start=0, length=len(PROMPT), samples=True)
