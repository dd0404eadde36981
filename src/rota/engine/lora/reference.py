"""Adapters in plain torch: the reference of the kernels, and the way in which a CPU applies a step's adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.lora.bank import Bank
from rota.engine.lora.gain_bias import apply_gain_bias, run_or_indices
from rota.engine.lora.layout import SiteFactors
from rota.engine.model.linear import Projection, projection
from rota.engine.model.sites import SiteShape
from rota.engine.padding import pad_rows, padded_rows
from rota.engine.step.device_step import LoraBatch

# ── reference ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Adapters in plain torch: the kernels are tested against it, and a CPU applies many ranks this way.
#
# Few tokens (decodes) take a few operations, whatever the number of adapters: on a small model a call into torch costs
# more than its work. Many tokens (prompts) take a few matrix products for each adapter.

Indices = NDArray[np.int64]

# From this product of tokens and rank on, a group's own matrix products pay. SmolLM2 in bf16, two cores of a Xeon.
WORTH_A_PRODUCT = 1024


def project_with_lora(project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Tensor:
    """A matrix product, plus what each token's adapter adds, with its gains and biases."""
    y = project(x)
    add_with_gain_bias(y, x, factors, batch)
    return y


def add_with_gain_bias(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    """As `add_lora`, and y is scaled and shifted where the adapter has gains and biases."""
    add_lora(y, x, factors, batch)
    if factors.gain_bias is not None:
        apply_gain_bias(y, factors.gain_bias, batch)


def add_lora(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    """y [tokens, outputs] += what each token's adapter makes of x [tokens, inputs]; base tokens do not change."""
    ranks = tuple(factors.ranks.tolist())
    work = sum((end - first) * ranks[slot] for slot, first, end in batch.groups)
    if work == 0:
        return
    if work <= WORTH_A_PRODUCT * len(batch.groups):
        table = None if factors.table is None else factors.table.cpu().numpy().tobytes()
        _add_at_once(y, x, factors, _pick(factors.shape, ranks, factors.place_rank, table, batch))
    else:
        _add_by_group(y, x, factors, ranks, batch)


def _add_by_group(y: Tensor, x: Tensor, factors: SiteFactors, ranks: tuple[int, ...], batch: LoraBatch) -> None:
    widths = factors.shape.widths
    for slot, first, end in batch.groups:
        rank = ranks[slot]
        if rank == 0:
            continue
        a, b = factors.of_slot(slot, rank)
        # One block-diagonal product is faster than one for each part.
        b = torch.block_diag(*b.split(widths, dim=1))  # [parts * rank, outputs]
        tokens = run_or_indices(batch.order[first:end])
        rows = pad_rows(y[tokens])
        rows.addmm_(torch.mm(a, pad_rows(x[tokens]).T).T, b)
        if isinstance(tokens, Tensor) or len(rows) > end - first:
            y[tokens] = rows[: end - first]


@dataclass(frozen=True, slots=True)
class _Picks:
    """Which numbers are multiplied when all tokens are computed at once, each by its own slot.

    B's rows are read in blocks; their width is the greatest common divisor of the parts' widths. An output block is a
    weighted sum of as many blocks as its token's slot has ranks, and of none for a base token. This operation is known
    as an embedding bag.
    """

    a_rows: Tensor  # [n] the rows of A that any token needs, among [places * parts * place_rank]
    weights: Tensor  # [picks] the index of each weight in A's rows @ x.T, [n * padded_rows(tokens)]
    blocks: Tensor  # [picks] the block of B for each weight, among [places * place_rank * blocks of a row]
    bags: Tensor  # [tokens * blocks of a row] where each output block's picks begin


def _add_at_once(y: Tensor, x: Tensor, factors: SiteFactors, picks: _Picks) -> None:
    a, b = factors.a.view(-1, factors.shape.inputs), factors.b.view(-1, math.gcd(*factors.shape.widths))
    shrunk = torch.mm(a.index_select(0, picks.a_rows), pad_rows(x).T)
    weights = shrunk.view(-1).take(picks.weights)
    expanded, *_ = torch.embedding_bag(b, picks.blocks, picks.bags, mode=0, per_sample_weights=weights)
    y += expanded.view(y.shape)


# All layers of a step share the picks: one for each kind of site, unless an adapter's layers differ in rank.
@functools.lru_cache(maxsize=16)
def _pick(shape: SiteShape, ranks: tuple[int, ...], place_rank: int, table: bytes | None, batch: LoraBatch) -> _Picks:
    places = _places(len(ranks), table)
    parts = len(shape.widths)
    part_of_block = np.arange(parts).repeat(np.array(shape.widths) // math.gcd(*shape.widths))
    blocks = len(part_of_block)
    device = batch.token_slots.device
    slot_of_token = batch.token_slots.cpu().numpy()
    rank_of_slot = np.zeros(len(ranks) + 1, np.int64)
    used = [slot for slot, _, _ in batch.groups]
    rank_of_slot[used] = np.array(ranks)[used]

    lengths = rank_of_slot.repeat(parts)
    first_row = lengths.cumsum() - lengths
    slot, part, nth = _in_runs(lengths, parts)
    place = places[slot, nth // place_rank]
    a_rows = (place * parts + part) * place_rank + nth % place_rank

    lengths = rank_of_slot[slot_of_token].repeat(blocks)
    token, block, nth = _in_runs(lengths, blocks)
    slot = slot_of_token[token]
    row = first_row[slot * parts + part_of_block[block]] + nth
    b_row = places[slot, nth // place_rank] * place_rank + nth % place_rank
    return _Picks(
        a_rows=torch.from_numpy(a_rows).to(device),
        weights=torch.from_numpy(row * padded_rows(len(slot_of_token)) + token).to(device),
        blocks=torch.from_numpy(b_row * blocks + block).to(device),
        bags=torch.from_numpy(lengths.cumsum() - lengths).to(device),
    )


def _places(slots: int, table: bytes | None) -> Indices:
    """[slots, places of a slot]; without a table a slot has one place, with its own number."""
    if table is None:
        return np.arange(slots)[:, None]
    return np.frombuffer(table, np.int32).astype(np.int64).reshape(slots, -1)


def _in_runs(lengths: Indices, inner: int) -> tuple[Indices, Indices, Indices]:
    """(outer, inner, nth) of every element of runs of these lengths, `inner` runs in each outer one."""
    run = np.arange(len(lengths)).repeat(lengths)
    nth = np.arange(len(run)) - (lengths.cumsum() - lengths)[run]
    return run // inner, run % inner, nth


# ── stacked ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A CPU applies a step's adapters in two products, whatever their number: their factors are stacked.
#
#     x [tokens, inputs]  ·  [ A of slot 2 ]ᵀ   =   [ x A₂ᵀ | x A₅ᵀ ]     columns of other adapters are masked, then
#                            [ A of slot 5 ]
#     [ x A₂ᵀ |   0   ]   ·  [ B of slot 2 ]    =   what each token's adapter adds
#                            [ B of slot 5 ]
#
# All tokens are multiplied by all adapters, since one large product is faster than a call for each adapter: a call
# costs more than its work. A stack is kept until a batch has an adapter that is not in it, or fewer than half of its
# adapters.

# Ranks of all adapters in a step, at one site. With more ranks most of the work would be masked.
MOST_RANKS = 96

# A slot and its generation: how many adapters were copied into it.
Resident = tuple[int, int]
# Adds to y what each token's adapter makes of x.
Add = Callable[[Tensor, Tensor, LoraBatch], None]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The stacked factors of one site of one layer."""

    columns: NDArray[np.int64]  # [columns between the two products] the slot of each column
    shrink: Projection
    expand: Projection


class StackedProjector:
    """Products with adapters on a CPU; keeps the newest stacks, and the masks of the newest batch."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._residents: tuple[Resident, ...] = ()
        # By factors, each with the residents of its stack.
        self._adds: dict[SiteFactors, tuple[tuple[Resident, ...], Add]] = {}
        self._batch: LoraBatch | None = None
        self._masks: dict[bytes, Tensor] = {}

    def __call__(
        self, project: Callable[[Tensor], Tensor], x: Tensor, factors: SiteFactors, batch: LoraBatch
    ) -> Tensor:
        """A matrix product, plus what each token's adapter adds, with its gains and biases."""
        y = project(x)
        if batch is not self._batch:
            self._take_batch(batch)
        residents, add = self._adds.get(factors, (None, _add_nothing))
        if residents is not self._residents:
            add = self._add_for(factors)
            self._adds[factors] = (self._residents, add)
        add(y, x, batch)
        if factors.gain_bias is not None:
            apply_gain_bias(y, factors.gain_bias, batch)
        return y

    def add(self, y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
        """Add to y what each token's adapter makes of x."""
        self(lambda _: y, x, factors, batch)

    def _take_batch(self, batch: LoraBatch) -> None:
        """Stacks stay while they have all adapters of the batch, and the batch has at least half of theirs."""
        self._batch = batch
        self._masks = {}
        residents = tuple((slot, self._bank.generation(slot)) for slot, _, _ in batch.groups)
        if 2 * len(residents) < len(self._residents) or not set(residents) <= set(self._residents):
            self._residents = residents

    def _add_for(self, factors: SiteFactors) -> Add:
        ranks = factors.ranks.tolist()
        present = [(slot, ranks[slot]) for slot, _ in self._residents if ranks[slot]]
        if not present:
            return _add_nothing
        if sum(rank for _, rank in present) > MOST_RANKS:
            return lambda y, x, batch: add_lora(y, x, factors, batch)
        return partial(self._add_stacked, _stack(factors, present))

    def _add_stacked(self, stack: _Stack, y: Tensor, x: Tensor, batch: LoraBatch) -> None:
        # Filled with zeros, not multiplied by zero: another adapter's columns may be infinite.
        y.add_(stack.expand(stack.shrink(x).masked_fill_(self._mask(stack, batch), 0.0)))

    def _mask(self, stack: _Stack, batch: LoraBatch) -> Tensor:
        """[tokens, columns] true where a column is not of the token's adapter."""
        columns = stack.columns.tobytes()
        if columns not in self._masks:
            self._masks[columns] = torch.from_numpy(batch.token_slots.numpy()[:, None] != stack.columns)
        return self._masks[columns]


def _stack(factors: SiteFactors, present: Sequence[tuple[int, int]]) -> _Stack:
    """The factors of these slots, each with its rank."""
    widths = factors.shape.widths
    columns = np.repeat([slot for slot, _ in present], [rank * len(widths) for _, rank in present])
    a, b = zip(*(factors.of_slot(slot, rank) for slot, rank in present), strict=True)
    # One block-diagonal product is faster than one for each part.
    diagonal = torch.cat([torch.block_diag(*one.split(widths, dim=1)) for one in b])
    return _Stack(columns, projection(torch.cat(a)), projection(diagonal.T.contiguous()))


def _add_nothing(y: Tensor, x: Tensor, batch: LoraBatch) -> None:
    """None of the adapters changes this site."""
