"""Plans written by hand: who sits where, with which blocks, and what each step computes; and graphs of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.plan import Chunk, Seat, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.engine.engine import Engine
from rota.engine.step.frames import StepFrame
from rota.engine.step.graphs import StepGraph

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE, BLOCKS, ROWS = 8, 64, 4
PROMPT = tuple(range(40, 63))
OTHER = (9, 8, 7, 200, 201, 5)


def expected(oracle: PreTrainedModel, prompt: tuple[int, ...], length: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        output = oracle.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=length, do_sample=False, eos_token_id=None
        )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


class Hand:
    """Writes plans by hand: who sits where, with which blocks, and what each step computes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._blocks: Iterator[int] = iter(range(BLOCKS - 1, -1, -1))  # not in order, on purpose
        self._seats: list[Seat] = []

    def seat(
        self, row: int, tokens: tuple[int, ...], room: int = 64, shared: tuple[int, ...] = (), **fields: Any
    ) -> tuple[int, ...]:
        """Take a row in the next step; answers the blocks it holds."""
        fresh = tuple(next(self._blocks) for _ in range(room // BLOCK_SIZE - len(shared)))
        blocks = tuple(BlockId(block) for block in shared + fresh)
        given = {"prompt_length": len(tokens), "sampling": GREEDY, **fields}
        self._seats.append(
            Seat(request_id=RequestId("r"), row=Row(row), adapter_id=BASE, tokens=tokens, blocks=blocks, **given)
        )
        return blocks

    def plan(self, *chunks: tuple[int, int, int, bool], decodes: tuple[int, ...] = ()) -> StepPlan:
        seats, self._seats = tuple(self._seats), []
        rows = tuple(Row(row) for row in decodes)
        parts = tuple(
            Chunk(row=Row(row), start=start, length=length, samples=samples) for row, start, length, samples in chunks
        )
        return StepPlan(step_id=1, seats=seats, chunks=parts, decodes=rows)

    def step(self, *chunks: tuple[int, int, int, bool], decodes: tuple[int, ...] = ()) -> StepResult:
        return self._engine.collect(self._engine.submit(self.plan(*chunks, decodes=decodes)))

    def decode(self, row: int, steps: int) -> list[int]:
        return [self.step(decodes=(row,)).tokens[0] for _ in range(steps)]


def no_graph(_frame: StepFrame, _has_adapters: bool) -> StepGraph:
    """Stands for a captured graph that nobody replays."""
    return cast(StepGraph, object())
