"""A step is two values: the plan that the scheduler makes, and the result that a world gives back.

A sequence that may run sits at a **row**: the device keeps its page table, its sampling parameters and its
newest token there. A plan does not repeat what a row already knows, so it is as large as what changed:

    seats    sequences that take a row, with all tokens known so far and the blocks that will hold their KV
    grants   one more block for a row that outgrew its last one
    chunks   rows that compute known tokens (prefill), [start, start + length)
    decodes  rows that compute the one token the device already holds for them
    scorings prompt tokens whose log-probabilities were asked for; the chunks of this step give them
    pools    chunks whose hidden states were asked for
    fetches  adapters to read from disk into host memory; loads: from there into a slot; drops: out of host memory
    idle_fetches  adapters to read too, for which no request waits: they must not delay `fetches`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, BlockId, RequestId, Row, Slot
from rota.core.request import Pooling, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A sequence takes a row; the sequence that sat there before is forgotten."""

    request_id: RequestId
    row: Row
    adapter_id: AdapterId
    tokens: tuple[int, ...]
    prompt_length: int
    blocks: tuple[BlockId, ...]
    sampling: SamplingParams
    computed: int = 0  # tokens whose KV the blocks hold already; if all but the last, the row may decode at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An adapter is copied into a slot; the adapter that was there is gone from this step on.

    The next step may use the slot at once: the device computes it after the copy. A step that does not use the slot
    runs beside the copy.
    """

    adapter_id: AdapterId
    slot: Slot
    is_awaited: bool = False  # the step itself waits for the copy, and no message reports it
    pages: tuple[int, ...] = ()  # where its ranks lie, in their order; empty: a slot has a place of its own
    matrices: tuple[int, ...] = ()  # where an embedding and a head of its own lie, in this order


@dataclass(frozen=True, slots=True)
class Grant:
    """A row's page table grows by one block."""

    row: Row
    block: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A row computes its known tokens [start, start + length) and samples only if they are its last."""

    row: Row
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The log-probabilities of a row's prompt tokens [start, end) are wanted, each judged by the token before it.

    chunk     |  4  5  6  7  |       computes these tokens
    scoring   |     5  6  7  8 |     and can judge those that follow one of them
    """

    row: Row
    start: int  # never the first token of a prompt: nothing comes before it
    end: int
    top: int  # how many of the likeliest tokens are told beside each


@dataclass(frozen=True, slots=True)
class Pool:
    """The hidden states of a row's chunk are wanted: the last one, or the sum of all."""

    row: Row
    pooling: Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the device shall do in one step."""

    step_id: int
    seats: tuple[Seat, ...] = ()
    grants: tuple[Grant, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Row, ...] = ()
    fetches: tuple[Adapter, ...] = ()
    idle_fetches: tuple[Adapter, ...] = ()
    loads: tuple[Load, ...] = ()
    drops: tuple[AdapterId, ...] = ()
    scorings: tuple[Scoring, ...] = ()
    pools: tuple[Pool, ...] = ()
    # What a step costs: the tokens it attends to, summed over its rows, and the number of different adapters.
    context_tokens: int = 0
    adapters: int = 0
    # When the scheduler wants to be asked again; infinity if only a message can change its answer.
    wake_at: float = math.inf

    @property
    def has_work(self) -> bool:
        """Is there anything for the device to do?"""
        return bool(self.chunks or self.decodes or self.reads or self.loads or self.drops)

    @property
    def reads(self) -> tuple[Adapter, ...]:
        """Every adapter that the device shall read from disk."""
        return self.fetches + self.idle_fetches

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        """How many tokens the step computes."""
        return len(self.decodes) + self.prompt_tokens

    @property
    def sampled_rows(self) -> tuple[Row, ...]:
        """The rows that get a token, in the order of `StepResult.tokens`: decodes, then chunks that sample."""
        samplers = [chunk.row for chunk in self.chunks if chunk.samples] if self.chunks else ()
        return (*self.decodes, *samplers) if samplers else self.decodes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability, and the most likely tokens with theirs, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


# Stands in the place of a token when a row's logits were not numbers, when its grammar cannot be followed, and when its
# adapter could not be copied into its slot. In the last case `AdapterFailed` has been posted before the step.
NO_TOKEN = -1
# Stands there when what a request says of tokens, all together, leaves none. Both are below every token.
NO_CHOICE = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the device did: one token per sampled row, one score per scored token, one vector per pool."""

    at: float
    # How long the device took; None: from the plan, or from the result before, to `at`.
    step_s: float | None = None
    tokens: tuple[int, ...] = ()  # or NO_TOKEN, or NO_CHOICE
    # By position in `tokens`, only for rows that asked.
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    # Of the plan's scorings, one after the other.
    scores: tuple[TokenLogprobs, ...] = ()
    # Of the plan's pools, one after the other: a float for each of the model's dimensions.
    pooled: tuple[tuple[float, ...], ...] = ()
    # By position in `tokens`: why a request's grammar cannot be followed any further, as a sentence.
    faults: tuple[tuple[int, str], ...] = ()
