"""Whole steps of an 8B shape at mixed lengths, in-process: plans written by hand, two in flight, every step a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from h200.assets import make_model
from h200.shapes import SHAPES
from h200.timed import Timed

from rota.core.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.plan import Chunk, Seat, StepPlan
from rota.core.request import SamplingParams
from rota.engine.build import build_engine
from rota.engine.engine import Engine
from rota.engine.step.frames import MOST_CHUNKS, StepFrame, mixed_frame

BLOCK_SIZE = CacheConfig().kv_block_size
LONGEST = 131_072
ROWS = 64
KV_BYTES = 2 * 32 * 8 * 128 * 2  # of a token, in all layers
COUNTED, SETTLING = 30, 4
STEPS: dict[str, list[int]] = {
    "64 x 600": [600] * 64,
    "64 x 2,000": [2000] * 64,
    "1 x 600": [600],
    "63 x 600": [600] * 63,
    "63 x 600 + 1 x 7,300": [600] * 63 + [7300],
    "56 x 600": [600] * 56,
    "56 x 600 + 8 x 7,300": [600] * 56 + [7300] * 8,
    "32 x 600 + 32 x 7,300": [600] * 32 + [7300] * 32,
    "63 x 600 + 1 x 100,000": [600] * 63 + [100_000],
}
# name -> tokens of a chunk, its cached prefix; beside 48 decodes of 600
CHUNKS = {"48 x 600 + 32 after 0": (32, 0), "48 x 600 + 32 after 100,000": (32, 100_000)}
ONE_LONGER = {
    "63 x 600 + 1 x 7,300": ("63 x 600", 7300),
    "56 x 600 + 8 x 7,300": ("56 x 600", 8 * 7300),
    "63 x 600 + 1 x 100,000": ("63 x 600", 100_000),
}


@dataclass(frozen=True, slots=True)
class Author:
    """Writes plans over rows of these lengths, whose blocks lie one row after the other."""

    lengths: Sequence[int]

    def seated(self) -> Iterator[StepPlan]:
        """Steps after which every row stands at its length; its cache is taken as it lies, but for the last token."""
        first = 0
        for row, length in enumerate(self.lengths):
            pages = -(-(length + COUNTED + SETTLING + 2) // BLOCK_SIZE)
            seat = seat_of(row, length, range(first, first + pages))
            first += pages
            chunk = Chunk(row=Row(row), start=length - 1, length=1, samples=True)
            yield StepPlan(step_id=0, seats=(seat,), chunks=(chunk,))

    def decode(self, step_id: int, rows: int) -> StepPlan:
        return StepPlan(step_id=step_id, decodes=tuple(Row(row) for row in range(rows)))


def seat_of(row: int, length: int, blocks: range) -> Seat:
    tokens = tuple((row * 7919 + place * 31) % 1000 for place in range(length))
    granted = tuple(BlockId(block) for block in blocks)
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=BASE,
        tokens=tokens,
        prompt_length=length,
        blocks=granted,
        sampling=SamplingParams(temperature=0.0),
    )


def drive(engine: Engine, plans: list[StepPlan]) -> float:
    """Milliseconds from step to step, two in flight as in the real loop."""
    device, flying = Timed(engine), None
    for plan in plans:
        following = device.submit(plan)
        if flying is not None:
            device.collect(flying)
        flying = following
    device.collect(flying)
    return statistics.median(step.seconds for step in device.steps[SETTLING:-1]) * 1e3


def decode_ms(engine: Engine, lengths: Sequence[int]) -> float:
    author = Author(lengths)
    for plan in author.seated():
        engine.collect(engine.submit(plan))
    return drive(engine, [author.decode(step, len(lengths)) for step in range(COUNTED + SETTLING + 1)])


def chunk_ms(engine: Engine, tokens: int, prefix: int) -> float:
    """48 decodes beside the same chunk again and again."""
    author = Author([600] * 48)
    for plan in author.seated():
        engine.collect(engine.submit(plan))
    pages = -(-(prefix + tokens) // BLOCK_SIZE)
    seat = seat_of(63, prefix + tokens, range(4000, 4000 + pages))
    chunk = Chunk(row=Row(63), start=prefix, length=tokens, samples=True)
    engine.collect(engine.submit(StepPlan(step_id=0, seats=(seat,), chunks=(chunk,))))
    decodes = tuple(Row(row) for row in range(48))
    return drive(
        engine, [StepPlan(step_id=step, chunks=(chunk,), decodes=decodes) for step in range(COUNTED + SETTLING + 1)]
    )


def block_count() -> int:
    """Enough for the largest step, with room for each row's new tokens."""
    return max(sum(lengths) for lengths in STEPS.values()) // BLOCK_SIZE + 8 * ROWS


def start(folder: Path) -> Engine:
    begun_at = time.monotonic()
    model = make_model(folder / "model", SHAPES["llama-8b"].config | {"max_position_embeddings": LONGEST})
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model_path=str(model), load_format="dummy", enable_cuda_graphs=False),
            cache=CacheConfig(kv_blocks=block_count()),
            scheduler=SchedulerConfig(max_running_requests=ROWS),
            lora=LoraConfig(max_loras_per_batch=1, max_lora_rank=8),
            quiet=True,
        )
    )
    with torch.inference_mode():
        for layer in engine._cache.layers:
            layer.keys.normal_(), layer.values.normal_()
    print(f"started after {time.monotonic() - begun_at:.1f} s", flush=True)
    return engine


def capture(engine: Engine) -> None:
    """Graphs of the frames that are asked for here, and of no other."""
    frames = [StepFrame(rows, page_changes=rows) for rows in (1, 56, ROWS)] + [mixed_frame(ROWS, 32)]
    body, device = engine._computation, engine._cache.device
    engine._model.tune([frame.tokens for frame in frames])
    logits = torch.empty(ROWS + MOST_CHUNKS, engine.spec.vocab_size, dtype=engine._cache.dtype, device=device)
    with torch.inference_mode():
        graphs = body.use_graphs([(frame, False) for frame in frames], logits)
        while graphs.capture_next():
            pass


def measure_steps(report: Any, folder: Path, kinds: dict[str, Any]) -> None:
    """Every case with each kind of attention."""
    engine = start(folder)
    model: Any = engine._model
    figures: dict[str, dict[str, Any]] = {name: {} for name in (*STEPS, *CHUNKS)}
    for kind, attention in kinds.items():
        model._attention = attention
        capture(engine)
        for name, lengths in STEPS.items():
            figures[name][f"{kind}_ms"] = round(decode_ms(engine, lengths), 3)
            report.note("steps", name, figures[name])
        for name, chunk in CHUNKS.items():
            figures[name][f"{kind}_ms"] = round(chunk_ms(engine, *chunk), 3)
            report.note("steps", name, figures[name])
    for name, (short, tokens) in ONE_LONGER.items():
        floor = tokens * KV_BYTES / report.facts["bytes_per_s"] * 1e3
        added = figures[name]["new_ms"] - figures[short]["new_ms"]
        figures[name] |= {"added_ms": round(added, 3), "added_floor_ms": round(floor, 3)}
        figures[name]["added_over_floor"] = round(added / floor, 3)
        report.note("steps", name, figures[name])
