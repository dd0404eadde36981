"""Requests with and without grammars on one engine, at any depth, with everything that may come between their steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.events import Event, Finished, Produced
from rota.core.grammar import Grammar
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row
from rota.core.plan import Chunk, Seat, StepPlan, TokenLogprobs
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.engine.build import build_engine
from rota.engine.drawing import Ticket
from rota.engine.engine import Engine
from rota.runtime.doorbell import Doorbell
from rota.runtime.live import LiveWorld
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from tests.builders import request
from tests.engine.eager_story import PROMPT
from tests.engine.fake_grammars import FakeGrammars
from tests.engine.lora.mixed_server import Server
from tests.offline import OfflineInbox
from tests.scheduler.balance import check_balance

ADAPTERS = 3
MODULUS = 7
# By the beginning of a request's name.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "top_p": 0.9, "seed": 11},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logprobs": 2},
    "all of it": {"temperature": 0.8, "top_k": 40, "seed": 3, "presence_penalty": 1.0, "logprobs": 1},
}


class GuidedServer(Server):
    """Few rows, blocks and slots, short chunks, and turns that are over at once."""

    def __init__(self, folder: Path, depth: Literal[1, 2], kv_blocks: int = 24, **model: Any) -> None:
        self._max_open = 100
        self.config = EngineConfig(
            model=ModelConfig(model_path=str(folder), **{"dtype": "float32", "device": "cpu", **model}),
            cache=CacheConfig(kv_block_size=8, kv_blocks=kv_blocks),
            scheduler=SchedulerConfig(
                max_running_requests=6, chunked_prefill_size=20, overlap_depth=depth, enable_prefix_caching=False
            ),
            lora=LoraConfig(max_loras_per_batch=2, max_lora_rank=16),
            policy=PolicyConfig(lora_policy="rotate", lora_rotation_quantum_ms=0.001, lora_max_stall_ms=0.002),
            quiet=True,
        )
        self.engine = build_engine(self.config)
        self.grammars = FakeGrammars()
        self.engine.use_grammars(self.grammars)
        self.scheduler = Scheduler.from_config(self.config, self.engine.capacity)
        self.doorbell = Doorbell()

    def serve_aborting(self, asked: list[Request], aborts: Callable[[RequestId, int], bool]) -> list[Event]:
        """`aborts` says of a request with so many tokens whether its client leaves."""
        inbox = OfflineInbox(asked, max_open=self._max_open, doorbell=self.doorbell)
        events: list[Event] = []
        written: dict[RequestId, int] = {}

        def emit(batch: list[Event]) -> None:
            check_balance(self.scheduler)
            events.extend(batch)
            for event in batch:
                if isinstance(event, Finished):
                    inbox.note_ended(event.request_id)
                elif isinstance(event, Produced):
                    for id in event.request_ids:
                        written[id] = written.get(id, 0) + 1
                        if aborts(id, written[id]):
                            inbox.abort(id)

        run(self.scheduler, LiveWorld(self.engine, inbox), emit, self.config.scheduler.overlap_depth)
        return events


class Watch:
    """Counts the steps of an engine whose draw had to wait."""

    def __init__(self, server: GuidedServer) -> None:
        self.waited = 0
        self.steps = 0
        submit, drawing = server.engine.submit, server.engine._drawing

        def noted(plan: StepPlan) -> Ticket:
            ticket = submit(plan)
            self.steps += 1
            self.waited += drawing._undrawn is not None
            return ticket

        server.engine.submit = noted  # type: ignore[method-assign]


def asked(new_tokens: int, guides: Callable[[str], bool] = lambda id: id.startswith("guided")) -> list[Request]:
    """Every way to sample, each with a grammar and without, for the base model and for adapters."""
    made = []
    for place, (way, fields) in enumerate(WAYS.items()):
        for number in range(ADAPTERS + 1):
            for kind in ("guided", "free"):
                id = f"{kind} {way} {number}"
                grammar: dict[str, Any] = {"grammar": Grammar(f"mod {MODULUS}")} if guides(id) else {}
                prompt, adapter = 5 + 9 * place, AdapterId(number)
                made.append(request(id, prompt, new_tokens, adapter=adapter, **fields, **grammar))
    return made


def logprobs(events: list[Event]) -> dict[RequestId, list[TokenLogprobs]]:
    told: dict[RequestId, list[TokenLogprobs]] = {}
    for event in events:
        if isinstance(event, Produced):
            for position, one in event.logprobs:
                told.setdefault(event.request_ids[position], []).append(one)
    return told


def in_flight(engine: Engine, samplings: Sequence[SamplingParams], steps: int, depth: int) -> list[list[int]]:
    """The answers of rows that all decode in every step, with so many steps in flight: equal kernels at any depth."""
    rows = [Row(number) for number in range(len(samplings))]
    pages = 8
    seats = [
        Seat(
            request_id=RequestId(f"r{row}"),
            row=row,
            adapter_id=BASE,
            tokens=PROMPT,
            prompt_length=len(PROMPT),
            blocks=tuple(BlockId(row * pages + page) for page in range(pages)),
            sampling=sampling,
        )
        for row, sampling in zip(rows, samplings, strict=True)
    ]
    chunks = tuple(Chunk(row=row, start=0, length=len(PROMPT), samples=True) for row in rows)
    plans = [StepPlan(step_id=1, seats=tuple(seats), chunks=chunks)]
    plans += [StepPlan(step_id=2 + number, decodes=tuple(rows)) for number in range(steps)]
    results, flying = [], deque[Ticket]()
    for plan in plans:
        flying.append(engine.submit(plan))
        if len(flying) == depth:
            results.append(engine.collect(flying.popleft()).tokens)
    results += [engine.collect(ticket).tokens for ticket in flying]
    return [list(answer) for answer in zip(*results, strict=True)]
