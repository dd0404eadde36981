"""Adapters in plain torch: the kernels are tested against it, and a CPU applies many ranks this way.

Few tokens (decodes) take a few operations, whatever the number of adapters: on a small model a call into torch costs
more than its work. Many tokens (prompts) take a few matrix products for each adapter.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.trims import trim
from rota.engine.model.linear import Projection
from rota.engine.model.sites import SiteShape
from rota.engine.padding import pad_rows, padded_rows
from rota.engine.step.lora_batch import LoraBatch

Indices = NDArray[np.int64]

# From this product of tokens and rank on, a group's own matrix products pay. SmolLM2 in bf16, two cores of a Xeon.
WORTH_A_PRODUCT = 1024


def project_with_lora(project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Tensor:
    """A matrix product, plus what each token's adapter adds, trimmed where the adapter has trims."""
    y = project(x)
    add_trimmed(y, x, factors, batch)
    return y


def add_trimmed(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    """As `add_lora`, and y is trimmed where the adapter has trims."""
    add_lora(y, x, factors, batch)
    if factors.trims is not None:
        trim(y, factors.trims, batch)


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
        tokens = _run_or_indices(batch.order[first:end])
        rows = pad_rows(y[tokens])
        rows.addmm_(torch.mm(a, pad_rows(x[tokens]).T).T, b)
        if isinstance(tokens, Tensor) or len(rows) > end - first:
            y[tokens] = rows[: end - first]


def _run_or_indices(tokens: Tensor) -> slice | Tensor:
    """A slice if the tokens are contiguous, as a prompt's are: a slice copies nothing."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens


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
