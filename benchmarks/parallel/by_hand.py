"""An engine driven by hand: adapters in slots, rows with a context, and steps that decode all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, BlockId, RequestId, Row, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import Chunk, Load, Scoring, Seat, StepPlan, StepResult
from rota.core.request import SamplingParams
from rota.engine.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
TIMEOUT_S = 30.0


class ByHand:
    """Rows take blocks of their own, as many as they will ever need."""

    def __init__(self, engine: Engine, context: int, adapters: Sequence[Path] = ()) -> None:
        self._engine = engine
        self._context = context
        self._pages = -(-context // engine.capacity.block_size)
        self._told: list[Message] = []
        engine.listen(self._told.append)
        for number, path in enumerate(adapters, start=1):
            adapter = Adapter(adapter_id=AdapterId(number), name=path.name, path=str(path))
            self._order(StepPlan(step_id=0, fetches=(adapter,)), AdapterFetched)
            load = Load(adapter_id=AdapterId(number), slot=Slot(number - 1))
            self._order(StepPlan(step_id=0, loads=(load,)), AdapterReady)

    def seat(self, row: int, tokens: Sequence[int], adapter: int, sampling: SamplingParams = GREEDY) -> Seat:
        """A sequence in its row; all tokens but the last count as computed, whatever the cache holds."""
        return self._seat(row, tokens, adapter, sampling, len(tokens) - 1)

    def prompt(
        self, row: int, tokens: Sequence[int], adapter: int, sampling: SamplingParams = GREEDY, is_scored: bool = False
    ) -> StepResult:
        """Compute a prompt; its last token gives the first of the answer."""
        seat = self._seat(row, tokens, adapter, sampling, 0)
        chunk = Chunk(row=Row(row), start=0, length=len(tokens), samples=True)
        scorings = (Scoring(row=Row(row), start=1, end=len(tokens), top=2),) if is_scored else ()
        return self.step(StepPlan(step_id=0, seats=(seat,), chunks=(chunk,), scorings=scorings))

    def step(self, plan: StepPlan) -> StepResult:
        return self._engine.collect(self._engine.submit(plan))

    def decode(self, rows: int, steps: int, seats: Sequence[Seat] = ()) -> tuple[list[float], list[tuple[int, ...]]]:
        """Seconds and tokens of every step, two of them in flight."""
        plan = StepPlan(step_id=0, decodes=tuple(Row(row) for row in range(rows)))
        first = StepPlan(step_id=0, decodes=plan.decodes, seats=tuple(seats))
        seconds, tokens = [], []
        ticket, ended_at = self._engine.submit(first), time.perf_counter()
        for _ in range(steps):
            following = self._engine.submit(plan)
            tokens.append(self._engine.collect(ticket).tokens)
            now = time.perf_counter()
            seconds.append(now - ended_at)
            ticket, ended_at = following, now
        tokens.append(self._engine.collect(ticket).tokens)
        return seconds, tokens

    def _seat(self, row: int, tokens: Sequence[int], adapter: int, sampling: SamplingParams, computed: int) -> Seat:
        return Seat(
            request_id=RequestId(f"r{row}"),
            row=Row(row),
            adapter_id=AdapterId(adapter),
            tokens=tuple(tokens),
            prompt_length=len(tokens),
            blocks=tuple(BlockId(row * self._pages + page) for page in range(self._pages)),
            sampling=sampling,
            computed=computed,
        )

    def _order(self, plan: StepPlan, awaited: type[Message]) -> None:
        """Give an order about an adapter, and wait until it is carried out."""
        self._told.clear()
        self.step(plan)
        ends_at = time.monotonic() + TIMEOUT_S
        while not any(isinstance(message, awaited) for message in list(self._told)):
            for message in list(self._told):
                assert not isinstance(message, AdapterFailed), message
            assert time.monotonic() < ends_at, f"no {awaited.__name__} within {TIMEOUT_S:g} s"
            time.sleep(0.005)  # between two looks
