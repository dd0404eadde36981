"""Factors of one site, tokens for them, and what each token must get: a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rota.engine.lora.bank import Bank
from rota.engine.lora.batch import make_batch
from rota.engine.lora.files.ranks import PAGE_RANK, pages_for
from rota.engine.lora.gain_bias import GainBias
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import StackedProjector
from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
QKV = SiteShape("qkv", 72, (("q_proj", 96), ("k_proj", 48), ("v_proj", 48)))
OUTPUT = SiteShape("o", 96, (("o_proj", 72),))
GATE_UP = SiteShape("gate_up", 72, (("gate_proj", 100), ("up_proj", 100)))


def random_factors(shape: SiteShape, ranks: list[int], max_rank: int, dtype: torch.dtype, device: str) -> SiteFactors:
    """Numbers of size 1 up to each slot's rank and NaN beyond: nobody may look there."""
    slots, parts = len(ranks), len(shape.parts)
    a = torch.full((slots, parts, max_rank, shape.inputs), torch.nan)
    b = torch.full((slots, max_rank, shape.outputs), torch.nan)
    for slot, rank in enumerate(ranks):
        a[slot, :, :rank] = torch.randn(parts, rank, shape.inputs) * shape.inputs**-0.5
        b[slot, :rank] = torch.randn(rank, shape.outputs) * max(rank, 1) ** -0.5
    return SiteFactors(
        shape,
        a.flatten(1, 2).to(device, dtype),
        b.to(device, dtype),
        torch.tensor(ranks, dtype=torch.int32, device=device),
    )


def with_gain_bias(factors: SiteFactors, slots: Collection[int]) -> SiteFactors:
    """The same factors, with random gains and biases in these slots; in memory slots lie apart."""
    outputs, count = factors.shape.outputs, len(factors.ranks)
    numbers = torch.cat([torch.ones(count, 1, outputs), torch.zeros(count, 1, outputs)], 1).repeat(1, 3, 1)[:, 2:4]
    for slot in slots:
        numbers[slot] = torch.randn(2, outputs) + 1.0
    has_gain_bias = torch.tensor([slot in slots for slot in range(count)])
    device = factors.a.device
    return replace(factors, gain_bias=GainBias(numbers.to(device), has_gain_bias.to(device)))


def token_by_token(y: Tensor, x: Tensor, factors: SiteFactors, token_slots: list[int]) -> Tensor:
    result, max_rank = y.double().cpu(), factors.max_rank
    for token, slot in enumerate(token_slots):
        if slot == len(factors.ranks):
            continue
        rank, first = int(factors.ranks[slot]), 0
        for part, width in enumerate(factors.shape.widths):
            a = factors.a[slot, part * max_rank : part * max_rank + rank].double().cpu()
            b = factors.b[slot, :rank, first : first + width].double().cpu()
            result[token, first : first + width] += (a @ x[token].double().cpu()) @ b
            first += width
        if factors.gain_bias is not None:
            gain, shift = factors.gain_bias.numbers[slot].double().cpu()
            result[token] = gain * result[token] + shift
    return result


class FirstResidents:
    """A bank into whose slots one adapter each has come."""

    def generation(self, slot: int) -> int:
        return 1


def stacked(project: Callable[[Tensor], Tensor], x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Tensor:
    return StackedProjector(cast(Bank, FirstResidents()))(project, x, factors, batch)


def batch_of(token_slots: list[int], slots: int, tile_size: int, device: str) -> LoraBatch:
    return make_batch(np.array(token_slots, np.int32), slots, torch.device(device), tile_size)


def random_rows(tokens: int, shape: SiteShape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """y and x."""
    return torch.randn(tokens, shape.outputs).to(device, dtype), torch.randn(tokens, shape.inputs).to(device, dtype)


def in_pages(factors: SiteFactors, spare: int = 2) -> SiteFactors:
    """The same factors in pages that lie anywhere; pages of no slot hold NaN, and so does what is beyond a rank."""
    ranks, parts, most = factors.ranks.tolist(), len(factors.shape.parts), pages_for(factors.max_rank)
    taken = [(slot, nth) for slot, rank in enumerate(ranks) for nth in range(pages_for(rank))]
    pages = torch.randperm(len(taken) + spare)
    a = torch.full((len(pages), parts, PAGE_RANK, factors.shape.inputs), torch.nan)
    b = torch.full((len(pages), PAGE_RANK, factors.shape.outputs), torch.nan)
    table = torch.full((len(ranks), most), len(pages) + 99, dtype=torch.int32)  # nobody may look beyond a rank
    for (slot, nth), page in zip(taken, pages.tolist(), strict=False):
        ranks_here = slice(nth * PAGE_RANK, (nth + 1) * PAGE_RANK)
        a[page] = factors.a[slot].view(parts, -1, factors.shape.inputs)[:, ranks_here]
        b[page] = factors.b[slot, ranks_here]
        table[slot, nth] = page
    like = factors.a
    return SiteFactors(factors.shape, a.flatten(1, 2).to(like), b.to(like), factors.ranks, table.to(like.device))
