"""Open products of a random batch, as a fused LoRA A and as shares give them, beside what adapters should add."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rota.engine.lora import reference
from rota.engine.lora.batch import make_batch
from rota.engine.lora.deferred import DeferredLora
from rota.engine.lora.gain_bias import GainBias
from rota.engine.lora.layout import SiteFactors
from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch
from tests.engine.lora.site_numbers import with_gain_bias

INPUTS = 48
TILE = 16
SHARES = (0.25, 0.75)


def open_product(
    widths: tuple[int, ...],
    token_slots: list[int],
    ranks: list[int],
    *,
    max_rank: int = 16,
    by_token: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    slots_with_gain_bias: Collection[int] = (),
    tile: int = TILE,
) -> tuple[DeferredLora, Tensor]:
    """A product that is open, and the float32 rows that it becomes at its close. Some slots have gains and biases."""
    shape = SiteShape("site", INPUTS, tuple((f"part {nth}", width) for nth, width in enumerate(widths)))
    factors = _factors(shape, ranks, max_rank, dtype)
    if slots_with_gain_bias:
        factors = with_gain_bias(factors, slots_with_gain_bias)
    x, wide = torch.randn(len(token_slots), INPUTS).to(dtype), torch.randn(len(token_slots), shape.outputs + 16)
    y = wide.to(dtype)[:, : shape.outputs]  # rows lie apart
    batch = make_batch(np.array(token_slots, np.int32), len(ranks), torch.device("cpu"), tile)
    expected, exact = y.float().clone(), SiteFactors(shape, factors.a.float(), factors.b.float(), factors.ranks)
    reference.add_with_gain_bias(expected, x.float(), replace(exact, gain_bias=factors.gain_bias), batch)
    shrunk = x @ factors.a.flatten(0, 1).T if by_token else _shares(x, factors, batch)
    product = DeferredLora(
        y=wide.to(device, dtype)[:, : shape.outputs], shrunk=shrunk.to(device), factors=_sent(factors, device),
        batch=make_batch(np.array(token_slots, np.int32), len(ranks), torch.device(device), tile), add=_never,
    )  # fmt: skip
    return product, expected.to(device)


def _factors(shape: SiteShape, ranks: list[int], max_rank: int, dtype: torch.dtype) -> SiteFactors:
    """Numbers of size 1 up to each slot's rank and zero beyond, as in a bank."""
    parts = len(shape.parts)
    a = torch.zeros(len(ranks), parts, max_rank, shape.inputs)
    b = torch.zeros(len(ranks), max_rank, shape.outputs)
    for slot, rank in enumerate(ranks):
        a[slot, :, :rank] = torch.randn(parts, rank, shape.inputs) * shape.inputs**-0.5
        b[slot, :rank] = torch.randn(rank, shape.outputs) * max(rank, 1) ** -0.5
    return SiteFactors(shape, a.flatten(1, 2).to(dtype), b.to(dtype), torch.tensor(ranks, dtype=torch.int32))


def _shares(x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Tensor:
    """[shares, tokens in the batch's order, parts * max_rank] float32; NaN where no adapter's token stands."""
    shrunk = torch.full((len(SHARES), len(x), factors.a.shape[1]), torch.nan)
    for slot, first, end in batch.groups:
        rows = x[batch.order[first:end].long()].float() @ factors.a[slot].float().T
        for share, size in enumerate(SHARES):
            shrunk[share, first:end] = size * rows
    return shrunk


def _sent(factors: SiteFactors, device: str) -> SiteFactors:
    gain_bias = factors.gain_bias
    sent = None if gain_bias is None else GainBias(gain_bias.numbers.to(device), gain_bias.has_gain_bias.to(device))
    return SiteFactors(
        factors.shape, factors.a.to(device), factors.b.to(device), factors.ranks.to(device), gain_bias=sent
    )


def _never(*_: object) -> None:
    raise AssertionError("an operation that adds the adapters' part itself closes no product")
