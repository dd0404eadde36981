"""Where slots share pages, every way to apply adapters gives what it gives where each slot has a place of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.lora import reference
from rota.engine.lora.files.ranks import pages_for
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import StackedProjector
from rota.engine.model.linear import Matrix
from rota.engine.model.sites import SiteShape
from rota.engine.step.device_step import LoraBatch
from tests.engine.lora.site_numbers import (
    BOUNDS,
    GATE_UP,
    OUTPUT,
    QKV,
    batch_of,
    in_pages,
    random_factors,
    random_rows,
    relative_error,
    token_by_token,
)
from tests.engine.triton_interpreter import DEVICE, load

triton_ops = load("rota.engine.lora.triton_ops")
# Several row tiles and iterations, whose ends lie inside a slot's pages.
SMALL = triton_ops.LoraTuning(
    triton_ops.ShrinkTuning(rows=16, share=64, most_shares=2, step=32, warps=4, stages=2),
    triton_ops.ExpandTuning(columns=64, ranks=16, warps=4),
)
WIDE = triton_ops.LoraTuning(
    triton_ops.ShrinkTuning(rows=64, share=96, most_shares=1, step=32, warps=4, stages=2),
    triton_ops.ExpandTuning(columns=128, ranks=32, warps=4),
)
AddLora = Callable[[Tensor, Tensor, SiteFactors, LoraBatch], None]


class FirstResidents:
    """A bank into whose slots one adapter each has come."""

    def generation(self, slot: int) -> int:
        return 1


def add_stacked(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    StackedProjector(FirstResidents())(lambda _: y, x, factors, batch)


def add_from_annex(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: object) -> None:
    """In a bank's pages the ranks beyond an adapter's are nought; pages of nobody hold anything."""
    a, b = factors.a.clone(), factors.b.clone()
    assert factors.table is not None
    for slot, rank in enumerate(factors.ranks.tolist()):
        for page in factors.table[slot, : pages_for(rank)].tolist():
            a[page].nan_to_num_()
            b[page].nan_to_num_()
    nothing = torch.zeros(factors.shape.outputs, factors.shape.inputs, dtype=x.dtype, device=x.device)
    fused = Matrix(torch.cat([nothing, a.flatten(0, 1)]))
    factors = replace(factors, a=a, b=b)
    own, shrunk = triton_ops.split_widened(fused(x), factors)
    triton_ops.expand(own, shrunk, factors, batch, tuning or triton_ops.tuning_for(batch))
    y += own


WAYS = {
    "torch": (reference.add_lora, DEVICE),
    "stacked": (add_stacked, "cpu"),
    "triton small": (partial(triton_ops.add_lora, tuning=SMALL), DEVICE),
    "triton wide": (partial(triton_ops.add_lora, tuning=WIDE), DEVICE),
    "annex small": (partial(add_from_annex, tuning=SMALL), DEVICE),
    "annex wide": (partial(add_from_annex, tuning=WIDE), DEVICE),
}


@pytest.fixture(params=WAYS)
def way(request) -> tuple[AddLora, str]:
    torch.manual_seed(0)
    return WAYS[request.param]


def check(
    way: tuple[AddLora, str],
    token_slots: list[int],
    ranks: list[int],
    shape: SiteShape,
    dtype: torch.dtype = torch.float32,
    tile_size: int = 16,
) -> None:
    add_lora, device = way
    factors = random_factors(shape, ranks, 64, dtype, device)
    y, x = random_rows(len(token_slots), shape, dtype, device)
    expected = token_by_token(y, x, factors, token_slots)

    add_lora(y, x, in_pages(factors), batch_of(token_slots, len(ranks), tile_size, device))

    assert relative_error(y, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("shape", [QKV, OUTPUT], ids=lambda shape: shape.name)
def test_adapters_of_many_ranks_share_a_step(way, shape):
    # 2 leaves the site alone, 5 is base.
    check(way, [3, 1, 5, 0, 2, 4, 3, 5, 1, 4], ranks=[4, 8, 0, 20, 64], shape=shape)


def test_half_precision_and_prompts(way):
    prompts = [1] * 70 + [3] * 9 + [0] * 5
    check(way, [0, 3, 1, *prompts], ranks=[9, 24, 0], shape=OUTPUT, dtype=torch.bfloat16, tile_size=64)


@pytest.mark.long("the interpreter takes a minute for random batches")
@pytest.mark.parametrize("seed", range(6))
def test_random_batches(way, seed):
    dice = np.random.default_rng(seed)
    slots = int(dice.integers(1, 7))
    ranks = dice.integers(0, 65, slots).tolist()
    token_slots = dice.integers(0, slots + 1, dice.integers(1, 40)).tolist()
    check(way, token_slots, ranks, shape=[QKV, OUTPUT, GATE_UP][seed % 3])


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_finds_adapters_in_pages_that_they_took_later():
    torch.manual_seed(0)
    own = random_factors(QKV, [20, 8, 64], 64, torch.float32, DEVICE)
    factors, token_slots = in_pages(own), [2, 0, 3, 1, 0, 2]
    batch, (y, x) = batch_of(token_slots, 3, 16, DEVICE), random_rows(6, QKV, torch.float32, DEVICE)
    triton_ops.add_lora(y.clone(), x, factors, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_ops.add_lora(y, x, factors, batch)

    for _ in range(3):
        moved = in_pages(own)
        for tensor, other in ((factors.a, moved.a), (factors.b, moved.b), (factors.table, moved.table)):
            assert tensor is not None
            tensor.copy_(other)
        expected = token_by_token(y, x, own, token_slots)
        graph.replay()
        assert relative_error(y, expected) < 2e-6
