"""Every way to apply adapters against a loop over tokens in float64; kernels run interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.lora import reference
from rota.engine.lora.batch import BatchFrame
from rota.engine.lora.files.ranks import pages_for
from rota.engine.lora.layout import SiteFactors
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
    stacked,
    token_by_token,
)
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

triton_ops = load("rota.engine.lora.triton_ops")
ExpandTuning, ShrinkTuning, Tuning = triton_ops.ExpandTuning, triton_ops.ShrinkTuning, triton_ops.LoraTuning

# Small shapes: several shares, row tiles, column tiles and iterations without large matrices.
SMALL = Tuning(
    ShrinkTuning(rows=16, share=32, most_shares=3, step=16, warps=4, stages=2),
    ExpandTuning(columns=32, ranks=16, warps=4),
)
# The other way round: rows of A that span parts, few shares, many ranks at a time.
WIDE = Tuning(
    ShrinkTuning(rows=64, share=64, most_shares=2, step=32, warps=4, stages=2),
    ExpandTuning(columns=64, ranks=64, warps=4),
)
AddLora = Callable[[Tensor, Tensor, SiteFactors, LoraBatch], None]


def add_through_annex(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning) -> None:
    """The matrix itself is nought; what lies beyond a slot's rank is nought in a bank."""
    factors = replace(factors, a=factors.a.nan_to_num(), b=factors.b.nan_to_num())
    add_from_annex(y, x, factors, batch, tuning)


def add_from_annex(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning) -> None:
    nothing = torch.zeros(factors.shape.outputs, factors.shape.inputs, dtype=x.dtype, device=x.device)
    fused = Matrix(torch.cat([nothing, factors.a.flatten(0, 1)]))
    own, shrunk = triton_ops.split_widened(fused(x), factors)
    triton_ops.expand(own, shrunk, factors, batch, tuning or triton_ops.tuning_for(batch))
    y += own


def add_stacked(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> None:
    stacked(lambda _: y, x, factors, batch)


WAYS = {
    "torch": (reference.add_lora, DEVICE),
    "stacked": (add_stacked, "cpu"),
    "triton": (triton_ops.add_lora, DEVICE),
    "triton small": (partial(triton_ops.add_lora, tuning=SMALL), DEVICE),
    "triton wide": (partial(triton_ops.add_lora, tuning=WIDE), DEVICE),
    "annex": (partial(add_through_annex, tuning=SMALL), DEVICE),
    "annex wide": (partial(add_through_annex, tuning=WIDE), DEVICE),
}


@pytest.fixture(params=WAYS)
def way(request) -> tuple[AddLora, str]:
    return WAYS[request.param]


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN: who reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(
    way: tuple[AddLora, str],
    token_slots: list[int],
    ranks: list[int],
    shape: SiteShape = QKV,
    max_rank: int = 16,
    dtype: torch.dtype = torch.float32,
    tile_size: int = 16,
    laid_out: Callable[[SiteFactors], SiteFactors] = lambda factors: factors,
) -> None:
    add_lora, device = way
    factors = random_factors(shape, ranks, max_rank, dtype, device)
    y, x = random_rows(len(token_slots), shape, dtype, device)
    expected = token_by_token(y, x, factors, token_slots)

    add_lora(y, x, laid_out(factors), batch_of(token_slots, len(ranks), tile_size, device))

    assert relative_error(y, expected) < BOUNDS[dtype]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("shape", "dtype"), zip([QKV, OUTPUT, GATE_UP], BOUNDS, strict=True))
def test_each_token_gets_what_its_own_adapter_adds(way, shape, dtype):
    # 0 is unused, 2 leaves the site alone, 4 is base; slots come in no order.
    check(way, [3, 1, 4, 1, 2, 3, 3, 4, 1, 4], ranks=[8, 5, 0, 16], shape=shape, dtype=dtype)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("max_rank", [8, 40])
def test_ranks_may_differ_as_widely_as_the_bank_allows(way, max_rank):
    check(way, [0, 1, 2, 2, 1, 0, 3], ranks=[1, max_rank, max_rank // 2 + 1], max_rank=max_rank)


@pytest.mark.usefixtures("poisoned_memory")
def test_tokens_of_one_adapter_may_need_many_tiles(way):
    check(way, [0] * 20 + [2] + [1] * 37, ranks=[48, 64], max_rank=64, shape=OUTPUT)


@pytest.mark.usefixtures("poisoned_memory")
def test_prompts_and_decodes_of_several_adapters_share_a_step(way):
    decodes = [0, 1, 3, 1]
    prompts = [1] * 70 + [3] * 9 + [0] * 40 + [2] * 5
    check(way, decodes + prompts, ranks=[24, 32, 0], shape=OUTPUT, max_rank=32, tile_size=64)


def test_prompts_scattered_over_a_step_are_found(way):
    check(way, [0, 1] * 50, ranks=[32, 24], max_rank=32, shape=GATE_UP, tile_size=64)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("seed", range(2))
def test_random_batches(way, seed):
    dice = np.random.default_rng(seed)
    slots = int(dice.integers(1, 7))
    ranks = dice.integers(0, 33, slots).tolist()
    token_slots = dice.integers(0, slots + 1, dice.integers(1, 40)).tolist()
    check(way, token_slots, ranks, shape=[QKV, OUTPUT, GATE_UP][seed % 3], max_rank=32)


@pytest.mark.parametrize("token_slots", [[2, 2, 2], [1, 1]], ids=["base", "an adapter without this site"])
def test_a_step_with_nothing_to_add_changes_nothing(way, token_slots):
    add_lora, device = way
    factors = random_factors(QKV, [4, 0], 16, torch.float32, device)
    y, x = random_rows(len(token_slots), QKV, torch.float32, device)
    before = y.clone()
    add_lora(y, x, factors, batch_of(token_slots, 2, 16, device))
    assert torch.equal(y, before)


def test_what_other_slots_hold_does_not_matter():
    """A slot that is being loaded may hold anything meanwhile."""
    factors = random_factors(QKV, [8, 8], 16, torch.float32, DEVICE)
    a, b = factors.a.nan_to_num(), factors.b.nan_to_num()
    y, x = random_rows(4, QKV, torch.float32, DEVICE)
    expected = token_by_token(y, x, replace(factors, a=a, b=b), [0, 2, 0, 2])
    a[1] = torch.nan

    add_from_annex(y, x, replace(factors, a=a, b=b), batch_of([0, 2, 0, 2], 2, 16, DEVICE), SMALL)

    assert relative_error(y, expected) < BOUNDS[torch.float32]


def test_base_tokens_in_a_mixed_step_keep_every_bit(way):
    add_lora, device = way
    factors = random_factors(QKV, [4], 16, torch.bfloat16, device)
    y, x = random_rows(3, QKV, torch.bfloat16, device)
    before = y.clone()
    add_lora(y, x, factors, batch_of([1, 0, 1], 1, 16, device))
    assert torch.equal(y[[0, 2]], before[[0, 2]])
    assert not torch.equal(y[1], before[1])


def test_rows_may_lie_apart(way):
    add_lora, device = way
    factors = random_factors(OUTPUT, [8], 16, torch.float32, device)
    wide_y, wide_x = torch.randn(5, 200, device=device), torch.randn(5, 200, device=device)
    y, x = wide_y[:, 64 : 64 + OUTPUT.outputs], wide_x[:, 32 : 32 + OUTPUT.inputs]
    expected, beside = token_by_token(y, x, factors, [0, 1, 0, 0, 1]), wide_y[:, :64].clone()
    add_lora(y, x, factors, batch_of([0, 1, 0, 0, 1], 1, 16, device))
    assert relative_error(y, expected) < 2e-6
    assert torch.equal(wide_y[:, :64], beside)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_an_assignment_it_was_not_captured_with():
    frame = BatchFrame(tokens=6, slots=3, tile_size=16)
    numbers = torch.from_numpy(frame.pack(np.array([], np.int32))[0]).to(DEVICE)
    factors = random_factors(QKV, [8, 16, 0], 16, torch.float32, DEVICE)
    batch, (y, x) = frame.unpack(numbers), random_rows(6, QKV, torch.float32, DEVICE)
    triton_ops.add_lora(y.clone(), x, factors, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_ops.add_lora(y, x, factors, batch)

    for token_slots in ([1, 0, 3, 1, 2], [0, 0, 0, 0, 0, 1]):
        numbers.copy_(torch.from_numpy(frame.pack(np.array(token_slots, np.int32))[0]))
        expected = token_by_token(y, x, factors, token_slots)
        graph.replay()
        assert relative_error(y, expected) < 2e-6


# Where slots share pages, every way to apply adapters gives what it gives where each slot has a place of its own.

# Several row tiles and iterations, whose ends lie inside a slot's pages.
SMALL_IN_PAGES = Tuning(
    ShrinkTuning(rows=16, share=64, most_shares=2, step=32, warps=4, stages=2),
    ExpandTuning(columns=64, ranks=16, warps=4),
)
WIDE_IN_PAGES = Tuning(
    ShrinkTuning(rows=64, share=96, most_shares=1, step=32, warps=4, stages=2),
    ExpandTuning(columns=128, ranks=32, warps=4),
)


def add_from_paged_annex(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: object) -> None:
    """In a bank's pages the ranks beyond an adapter's are nought; pages of nobody hold anything."""
    a, b = factors.a.clone(), factors.b.clone()
    assert factors.table is not None
    for slot, rank in enumerate(factors.ranks.tolist()):
        for page in factors.table[slot, : pages_for(rank)].tolist():
            a[page].nan_to_num_()
            b[page].nan_to_num_()
    add_from_annex(y, x, replace(factors, a=a, b=b), batch, tuning)


IN_PAGES = {"max_rank": 64, "laid_out": in_pages}
PAGED_WAYS = {
    "torch": (reference.add_lora, DEVICE),
    "stacked": (add_stacked, "cpu"),
    "triton small": (partial(triton_ops.add_lora, tuning=SMALL_IN_PAGES), DEVICE),
    "triton wide": (partial(triton_ops.add_lora, tuning=WIDE_IN_PAGES), DEVICE),
    "annex small": (partial(add_from_paged_annex, tuning=SMALL_IN_PAGES), DEVICE),
    "annex wide": (partial(add_from_paged_annex, tuning=WIDE_IN_PAGES), DEVICE),
}


@pytest.fixture(params=PAGED_WAYS)
def paged_way(request) -> tuple[AddLora, str]:
    return PAGED_WAYS[request.param]


@pytest.mark.parametrize("shape", [QKV, OUTPUT], ids=lambda shape: shape.name)
def test_adapters_of_many_ranks_share_a_step(paged_way, shape):
    # 2 leaves the site alone, 5 is base.
    check(paged_way, [3, 1, 5, 0, 2, 4, 3, 5, 1, 4], ranks=[4, 8, 0, 20, 64], shape=shape, **IN_PAGES)


def test_half_precision_and_prompts(paged_way):
    prompts = [1] * 70 + [3] * 9 + [0] * 5
    check(
        paged_way, [0, 3, 1, *prompts], ranks=[9, 24, 0], shape=OUTPUT, dtype=torch.bfloat16, tile_size=64, **IN_PAGES
    )


@pytest.mark.long("the interpreter takes a minute for random batches")
@pytest.mark.parametrize("seed", range(6))
def test_random_batches_in_pages(paged_way, seed):
    dice = np.random.default_rng(seed)
    slots = int(dice.integers(1, 7))
    ranks = dice.integers(0, 65, slots).tolist()
    token_slots = dice.integers(0, slots + 1, dice.integers(1, 40)).tolist()
    check(paged_way, token_slots, ranks, shape=[QKV, OUTPUT, GATE_UP][seed % 3], **IN_PAGES)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_finds_adapters_in_pages_that_they_took_later():
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
