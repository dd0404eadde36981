"""Sequences that lose their row and go on in another: by hand in an engine, and live with very few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Produced
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row
from rota.core.plan import Chunk, Grant, Seat, StepPlan, StepResult, TokenLogprobs
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.runtime.doorbell import Doorbell
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.eager_story import BLOCK_SIZE, PAGES, PROMPT
from tests.engine.lora.mixed_server import Server

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.3, top_p=0.9, seed=7),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.8, logprobs=3
    ),
    "all of it": SamplingParams(temperature=0.9, top_k=40, seed=5, frequency_penalty=1.1, logprobs=2),
}
STEPS = 16


def answer(engine: Engine, sampling: SamplingParams, moves_every: int | None) -> list[Any]:
    """Tokens and logprobs of a base request; every so many steps another sequence takes its row."""
    row, blocks, tokens = Row(0), [BlockId(page) for page in range(2)], list(PROMPT)
    chunk = Chunk(row=row, start=0, length=len(PROMPT), samples=True)
    seat = _seat(row, tokens, blocks, sampling, 0)
    told = _run(engine, StepPlan(step_id=1, seats=(seat,), chunks=(chunk,)))
    tokens += told.tokens
    results: list[Any] = [(told.tokens, told.logprobs)]
    for number in range(STEPS):
        seats: list[Seat] = []
        grants: tuple[Grant, ...] = ()
        if moves_every and number % moves_every == 0:
            _take(engine, row)
            row = Row((row + 3) % 5)
            seats = [_seat(row, tokens, blocks, sampling, len(tokens) - 1)]
        if len(tokens) > len(blocks) * BLOCK_SIZE:
            blocks.append(BlockId(len(blocks)))
            grants = (Grant(row, blocks[-1]),)
        told = _run(engine, StepPlan(step_id=1, seats=tuple(seats), grants=grants, decodes=(row,)))
        tokens += told.tokens
        results.append((told.tokens, told.logprobs))
    return results


def _run(engine: Engine, plan: StepPlan) -> StepResult:
    return engine.collect(engine.submit(plan))


def _take(engine: Engine, row: Row) -> None:
    """Another sequence computes in the row, with other tokens, parameters and blocks."""
    blocks = [BlockId(PAGES + page) for page in range(2)]
    seat = _seat(row, list(range(30, 42)), blocks, SamplingParams(seed=1, presence_penalty=0.5, logprobs=1), 0)
    _run(engine, StepPlan(step_id=1, seats=(seat,), chunks=(Chunk(row=row, start=0, length=12, samples=True),)))
    _run(engine, StepPlan(step_id=1, decodes=(row,)))


def _seat(row: Row, tokens: list[int], blocks: list[BlockId], sampling: SamplingParams, computed: int) -> Seat:
    return Seat(
        request_id=RequestId("moved"),
        row=row,
        adapter_id=BASE,
        tokens=tuple(tokens),
        prompt_length=len(PROMPT),
        blocks=tuple(blocks),
        sampling=sampling,
        computed=computed,
    )


class FewRows(Server):
    """Two slots that change hands nearly every step, and so many rows."""

    def __init__(
        self, folder: Path, rows: int, depth: Literal[1, 2], cache: dict[str, Any] | None = None, **model: Any
    ) -> None:
        self._max_open = 100
        self.plans: list[StepPlan] = []
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), **{"dtype": "float32", "device": "cpu", **model}),
            cache=CacheConfig(kv_block_size=8, kv_blocks=512, **(cache or {})),
            scheduler=SchedulerConfig(
                max_running_requests=rows, chunked_prefill_size=48, overlap_depth=depth, enable_prefix_caching=False
            ),
            # A step waits for its loads: how often rows are taken must not depend on when a thread gets to run.
            lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=16, enable_lora_overlap_loading=False),
            policy=PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=0.001, lora_max_stall_ms=0.002),
            quiet=True,
        )
        self.engine = build_engine(self.config)
        submit = self.engine.submit

        def noted(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return submit(plan)

        self.engine.submit = noted  # type: ignore[method-assign]
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()

    @property
    def resumed(self) -> int:
        """How often a sequence sat down and decoded in the same step."""
        return sum(seat.row in plan.decodes for plan in self.plans for seat in plan.seats)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.length for plan in self.plans for chunk in plan.chunks)


def asked(adapters: int, new_tokens: int) -> list[Request]:
    """Each way to sample, for each adapter."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "top_p": 0.9, "seed": 11},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "logprobs": 1},
    ]
    return [
        request(f"{number}-{way}", prompt=9 + 5 * way, max_new_tokens=new_tokens, adapter=AdapterId(number), **fields)
        for number in range(1, adapters + 1)
        for way, fields in enumerate(ways)
    ]


def logprobs(events: list[Event]) -> dict[RequestId, list[TokenLogprobs]]:
    told: dict[RequestId, list[TokenLogprobs]] = {}
    for event in events:
        if isinstance(event, Produced):
            for position, one in event.logprobs:
                told.setdefault(event.request_ids[position], []).append(one)
    return told
