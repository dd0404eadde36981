"""A device made of integers, whose KV holds the tokens themselves: a wrong block gives a wrong token."""

from __future__ import annotations

import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.errors import ModelError
from rota.core.events import Event, Finished, Produced
from rota.core.ids import BASE, AdapterId, BlockId, RequestId, Row, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import Pool, Scoring, Seat, StepPlan, StepResult, TokenLogprobs
from rota.core.request import SamplingParams
from rota.core.stages import Stage
from rota.runtime.world import Device
from tests.builders import VOCABULARY, capacity

NextToken = Callable[[Sequence[int]], int]


def folded(tokens: Sequence[int]) -> int:
    """The fake model: the next token depends on every token before it, and is never below three."""
    return 3 + zlib.crc32(array("q", tokens).tobytes()) % (VOCABULARY - 3)


def alphabet(tokens: Sequence[int]) -> int:
    """A model that says a letter a token: "abc…", beginning where the length of the prompt says."""
    return ord("a") + len(tokens) % 26


def continuation(
    prompt: Sequence[int], length: int, next_token: NextToken = folded, window: int | None = None
) -> list[int]:
    """What a faultless run of the fake model answers; with a window it sees only so many of the last tokens."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens[-window:] if window else tokens))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class FakeRow:
    """What the device knows of a seated sequence."""

    tokens: list[int]
    blocks: list[BlockId]
    sampling: SamplingParams
    adapter_id: AdapterId


@dataclass(frozen=True, slots=True)
class FakeTicket:
    """A step under way."""

    step_id: int
    ready_at: float
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...]
    scores: tuple[TokenLogprobs, ...] = ()
    pooled: tuple[tuple[float, ...], ...] = ()


@dataclass(slots=True)
class FakeDevice(Device[FakeTicket]):
    """Computes at `submit`, as a real device's queue would, and lets `collect` wait `step_s` a step.

    It reads the context only through the page table and fails on a slot that nobody wrote. `plans` keeps
    what it was told. An adapter whose path says "broken" cannot be read, and its headers tell; one whose path says
    "rotten" cannot be read either, and they do not.
    """

    capacity: Capacity = field(default_factory=capacity)
    step_s: float = 0.0
    next_token: NextToken = folded
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    plans: list[StepPlan] = field(default_factory=list)
    stages: tuple[Stage, ...] = ()  # of its building
    _rows: dict[Row, FakeRow] = field(default_factory=dict)
    _kv: dict[tuple[BlockId, int], tuple[AdapterId, int]] = field(default_factory=dict)
    _slots: dict[Slot, AdapterId] = field(default_factory=dict)
    _pages: dict[int, AdapterId] = field(default_factory=dict)
    _pages_of: dict[AdapterId, tuple[int, ...]] = field(default_factory=dict)
    _post: Callable[[Message], None] | None = None
    _busy_until: float = 0.0
    _under_way: deque[int] = field(default_factory=deque)

    def listen(self, post: Callable[[Message], None]) -> None:
        self._post = post

    def submit(self, plan: StepPlan) -> FakeTicket:
        self.plans.append(plan)
        if self._post:
            for adapter in plan.reads:
                self._post(self.fetch(adapter))
            for load in plan.loads:
                self._post(AdapterReady(load.adapter_id, self.now()))
        for load in plan.loads:
            self._slots[load.slot] = load.adapter_id
            assert all(0 <= page < self.capacity.pages for page in load.pages), "a page does not exist"
            assert all(0 <= place < self.capacity.matrices for place in load.matrices), "a place does not exist"
            self._pages |= dict.fromkeys(load.pages, load.adapter_id)
            self._pages_of[load.adapter_id] = load.pages
        for seat in plan.seats:
            self._sit_down(seat)
        for grant in plan.grants:
            self._check_block(grant.block)
            self._rows[grant.row].blocks.append(grant.block)
        ends = self._write(plan)
        tokens = [self._sample(row, ends[row]) for row in plan.sampled_rows]
        logprobs = [
            (position, _logprobs(token, self._rows[row].sampling.logprobs))
            for position, (row, token) in enumerate(zip(plan.sampled_rows, tokens, strict=True))
            if self._rows[row].sampling.logprobs is not None
        ]
        scores = tuple(score for scoring in plan.scorings for score in self._scores(plan, scoring))
        pooled = tuple(self._pooled(plan, pool) for pool in plan.pools)
        self._busy_until = max(self._busy_until, self.now()) + self.step_s
        self._under_way.append(plan.step_id)
        return FakeTicket(plan.step_id, self._busy_until, tuple(tokens), tuple(logprobs), scores, pooled)

    def collect(self, ticket: FakeTicket) -> StepResult:
        assert self._under_way.popleft() == ticket.step_id, "steps are collected in the order they began"
        wait_s = ticket.ready_at - self.now()
        if wait_s > 0:
            self.sleep(wait_s)  # a step takes its time
        return StepResult(
            at=self.now(), tokens=ticket.tokens, logprobs=ticket.logprobs, scores=ticket.scores, pooled=ticket.pooled
        )

    def check(self, adapter: Adapter) -> str:
        return f"{adapter.path} is broken." if "broken" in adapter.path else ""

    def fetch(self, adapter: Adapter) -> Message:
        if reason := self.check(adapter):
            return AdapterFailed(adapter_id=adapter.adapter_id, at=self.now(), reason=reason)
        if "rotten" in adapter.path:
            return AdapterFailed(adapter_id=adapter.adapter_id, at=self.now(), reason=f"{adapter.path} is rotten.")
        return AdapterFetched(adapter_id=adapter.adapter_id, at=self.now())

    def _sit_down(self, seat: Seat) -> None:
        assert 0 <= seat.row < self.capacity.rows, f"row {seat.row} does not exist"
        for block in seat.blocks:
            self._check_block(block)
        self._rows[seat.row] = FakeRow(list(seat.tokens), list(seat.blocks), seat.sampling, seat.adapter_id)

    def _check_block(self, block: BlockId) -> None:
        assert 0 <= block < self.capacity.blocks, f"block {block} does not exist"

    def _write(self, plan: StepPlan) -> dict[Row, int]:
        """Stores the tokens of all rows before anyone reads; answers where each row's context ends."""
        ends: dict[Row, int] = {}
        spans = [(chunk.row, chunk.start, chunk.start + chunk.length) for chunk in plan.chunks]
        spans += [(row, len(self._rows[row].tokens) - 1, len(self._rows[row].tokens)) for row in plan.decodes]
        for row, start, end in spans:
            assert row not in ends, f"row {row} computes twice in step {plan.step_id}"
            assert end <= len(self._rows[row].tokens), f"row {row} computes tokens it does not know"
            adapter = self._rows[row].adapter_id
            assert adapter == BASE or adapter in self._slots.values(), f"row {row} runs without its adapter {adapter}"
            own = self._pages_of.get(adapter, ())
            assert all(self._pages[page] == adapter for page in own), f"pages of adapter {adapter} were overwritten"
            self._read(row, start + 1 - (self.capacity.window or start + 1), start)
            for position in range(start, end):
                self._kv[self._slot(row, position)] = (adapter, self._rows[row].tokens[position])
            ends[row] = end
        return ends

    def _sample(self, row: Row, end: int) -> int:
        token = self.next_token(self._read(row, end - (self.capacity.window or end), end))
        self._rows[row].tokens.append(token)
        return token

    def _read(self, row: Row, start: int, end: int) -> list[int]:
        """The tokens whose KV a row finds at these positions."""
        context = []
        for position in range(max(0, start), end):
            slot = self._slot(row, position)
            assert slot in self._kv, f"row {row} reads position {position}, which nobody computed"
            adapter, token = self._kv[slot]
            assert adapter == self._rows[row].adapter_id, f"row {row} reads KV of adapter {adapter}"
            context.append(token)
        return context

    def _scores(self, plan: StepPlan, scoring: Scoring) -> list[TokenLogprobs]:
        """Each token is the likeliest, and its neighbours follow."""
        (chunk,) = [chunk for chunk in plan.chunks if chunk.row == scoring.row]
        assert chunk.start < scoring.start < scoring.end <= chunk.start + chunk.length + 1, "no logits judge these"
        return [_logprobs(token, scoring.top) for token in self._rows[scoring.row].tokens[scoring.start : scoring.end]]

    def _pooled(self, plan: StepPlan, pool: Pool) -> tuple[float, ...]:
        """A token's hidden state is the token itself, and how many came with it."""
        (chunk,) = [chunk for chunk in plan.chunks if chunk.row == pool.row]
        tokens = self._rows[pool.row].tokens[chunk.start : chunk.start + chunk.length]
        return (float(sum(tokens)), float(len(tokens))) if pool.pooling == "mean" else (float(tokens[-1]), 1.0)

    def _slot(self, row: Row, position: int) -> tuple[BlockId, int]:
        index, offset = divmod(position, self.capacity.block_size)
        blocks = self._rows[row].blocks
        assert index < len(blocks), f"row {row} has no block for position {position}"
        return blocks[index], offset


def _logprobs(token: int, count: int | None) -> TokenLogprobs:
    """The chosen token is the likeliest, and its neighbours follow."""
    return TokenLogprobs(-0.5, tuple(((token + i) % VOCABULARY, -0.5 - i) for i in range(count or 0)))


def spelling_device(_: EngineConfig) -> FakeDevice:
    """For a server in a program of its own, whose engine's process looks the function up by its name."""
    return FakeDevice(next_token=alphabet)


def no_such_model() -> FakeDevice:
    raise ModelError("There is no model in /nowhere.")


def outputs(events: Iterable[Event]) -> dict[RequestId, list[int]]:
    """The tokens each request was given."""
    given: dict[RequestId, list[int]] = {}
    for event in events:
        if isinstance(event, Produced):
            for request_id, token in zip(event.request_ids, event.tokens, strict=True):
                given.setdefault(request_id, []).append(token)
    return given


def endings(events: Iterable[Event]) -> dict[RequestId, Finished]:
    """The last event of each request; fails if one ended twice."""
    ended: dict[RequestId, Finished] = {}
    for event in events:
        if isinstance(event, Finished):
            assert event.request_id not in ended, f"{event.request_id} ended twice"
            ended[event.request_id] = event
    return ended
