"""Operations that add the adapters' part themselves, against the same in plain torch, one after the other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.layer_cache import EIGHT_BITS, LayerCache, from_eight_bits
from rota.engine.lora.batch import BatchFrame, make_batch
from rota.engine.lora.deferred import DeferredLora
from rota.engine.lora.gain_bias import GainBias
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import add_with_gain_bias
from rota.engine.model.sites import SiteShape
from rota.engine.ops.reference import Operations
from rota.engine.step.device_step import DeviceStep, LoraBatch, int32
from tests.engine.lora.site_numbers import with_gain_bias
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

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
    add_with_gain_bias(expected, x.float(), replace(exact, gain_bias=factors.gain_bias), batch)
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


reference = Operations()
fused = load("rota.engine.ops.fused").FusedOperations()

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
EPSILON = 1e-5
# Slot 0 is unused, 2 leaves the site alone, 4 is base; slots come in no order, and base tokens fill more than a tile.
MIXED, RANKS = [3, 1, 4, 1, 2, 3, 3, 4, 1, 4, *([4] * 15), 3], [8, 5, 0, 16]
BATCHES = {
    "mixed": (MIXED, RANKS, 16),
    "with trims in two slots": (MIXED, RANKS, 16, (1, 3)),
    "one token": ([0], [16], 16),
    "two tiles of one slot": ([1] * 17 + [0], [24, 20], 24),
    "base and an adapter without the site": ([2, 1, 2], [4, 0], 16),
}
LARGE_TILE = 64


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=BATCHES)
def batch(request) -> dict:
    token_slots, ranks, max_rank, *slots_with_gain_bias = BATCHES[request.param]
    slots = {"slots_with_gain_bias": slots_with_gain_bias[0]} if slots_with_gain_bias else {}
    return {"token_slots": token_slots, "ranks": ranks, "max_rank": max_rank, "device": DEVICE, **slots}


# A fused LoRA A's product, or shares.
BY_TOKEN = pytest.mark.parametrize(("by_token", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])


@BY_TOKEN
def test_silu_multiply_adds_to_gate_and_up_what_each_token_s_adapter_adds(batch, by_token, dtype):
    product, expected = open_product((100, 100), by_token=by_token, dtype=dtype, **batch)
    assert relative_error(fused.silu_multiply(product), reference.silu_multiply(expected)) < BOUNDS[dtype]


@BY_TOKEN
def test_silu_multiply_adds_the_same_in_tiles_of_prompts(batch, by_token, dtype):
    product, expected = open_product((100, 100), by_token=by_token, dtype=dtype, tile=LARGE_TILE, **batch)
    assert relative_error(fused.silu_multiply(product), reference.silu_multiply(expected)) < BOUNDS[dtype]


@BY_TOKEN
def test_add_rms_norm_norms_the_sum_of_product_adapters_and_residual(batch, by_token, dtype):
    product, expected = open_product((72,), by_token=by_token, dtype=dtype, **batch)
    residual, weight = torch.randn(len(expected), 72), torch.randn(72).to(DEVICE, dtype)
    residual = residual.to(DEVICE, dtype)
    expected_norm, expected_total = reference.add_rms_norm(expected, residual.float(), weight.float(), EPSILON)
    norm, total = fused.add_rms_norm(product, residual, weight, EPSILON)
    assert relative_error(total, expected_total) < BOUNDS[dtype]
    assert relative_error(norm, expected_norm) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "by_token", "with_norms"), [(3, 2, 32, True, False), (2, 1, 40, False, True)]
)
def test_queries_are_rotated_and_keys_and_values_stored(batch, heads, kv_heads, head_dim, by_token, with_norms):
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    product, expected = open_product(widths, by_token=by_token, **batch)
    rotary, weights, step = torch.randn(50, head_dim).to(DEVICE), torch.randn(2, head_dim).to(DEVICE), step_of(expected)
    norms = (weights[0], weights[1], EPSILON) if with_norms else None
    found, other = cache_of(kv_heads, head_dim), cache_of(kv_heads, head_dim)
    query = fused.rotate_and_store(product, rotary, step, found, norms)
    expected_query = reference.rotate_and_store(expected, rotary, step, other, norms)
    assert relative_error(query, expected_query) < 2e-6
    assert relative_error(found.keys, other.keys) < 2e-6
    assert relative_error(found.values, other.values) < 2e-6


def test_a_cache_in_eight_bits_gets_codes_and_scales():
    product, expected = open_product((32, 64, 64), MIXED, RANKS, device=DEVICE)
    step, rotary = step_of(expected), torch.randn(50, 32).to(DEVICE)
    found, other = (cache_of(2, 32, EIGHT_BITS) for _ in range(2))
    fused.rotate_and_store(product, rotary, step, found, None)
    reference.rotate_and_store(expected, rotary, step, other, None)
    torch.testing.assert_close(found.scales, other.scales)
    for mine, theirs, place in ((found.keys, other.keys, 0), (found.values, other.values, 1)):
        read = [from_eight_bits(codes, found.scales[..., place], torch.float32) for codes in (mine, theirs)]
        assert relative_error(*read) < 1e-2  # where sums differ in the last bit, few codes do


def test_base_tokens_keep_every_bit_of_the_plain_operations():
    product, _ = open_product((64, 64), MIXED, RANKS, dtype=torch.bfloat16, device=DEVICE)
    plain = fused.silu_multiply(product.y.contiguous())
    is_base = torch.tensor([slot == len(RANKS) for slot in MIXED], device=DEVICE)
    found = fused.silu_multiply(product)
    assert torch.equal(found[is_base], plain[is_base])
    assert not torch.equal(found[~is_base], plain[~is_base])


def test_beside_slots_with_trims_all_others_keep_every_bit():
    torch.manual_seed(0)
    plain, _ = open_product((64, 64), MIXED, RANKS, dtype=torch.bfloat16, device=DEVICE)
    biased = replace(plain, factors=with_gain_bias(plain.factors, (1,)))
    is_other = torch.tensor([slot != 1 for slot in MIXED], device=DEVICE)
    found, expected = fused.silu_multiply(biased), fused.silu_multiply(plain)
    assert torch.equal(found[is_other], expected[is_other])
    assert not torch.equal(found[~is_other], expected[~is_other])


def test_what_other_slots_hold_does_not_matter():
    """A slot that is being loaded may hold anything meanwhile."""
    product, expected = open_product((64, 64), [0, 2, 0, 2], [8, 8], device=DEVICE)
    product.factors.b[1], product.shrunk[:, 32:] = torch.nan, torch.nan
    assert relative_error(fused.silu_multiply(product), reference.silu_multiply(expected)) < BOUNDS[torch.float32]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_captured_graph_serves_an_assignment_it_was_not_captured_with():
    frame = BatchFrame(tokens=6, slots=3, tile_size=16)
    numbers = torch.from_numpy(frame.pack(np.array([], np.int32))[0]).to(DEVICE)
    product, _ = open_product((64, 64), [0] * 6, [8, 16, 0], device=DEVICE)
    product = replace(product, batch=frame.unpack(numbers))
    fused.silu_multiply(product)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused.silu_multiply(product)
    for token_slots in ([1, 0, 3, 1, 2], [0, 0, 0, 0, 0, 1]):
        numbers.copy_(torch.from_numpy(frame.pack(np.array(token_slots, np.int32))[0]))
        graph.replay()
        assert relative_error(found, reference.silu_multiply(summed(product, token_slots))) < 2e-6


def summed(product: DeferredLora, token_slots: list[int]) -> Tensor:
    """The rows of an annexed product of two parts, token by token."""
    y, b, max_rank = product.y.clone(), product.factors.b, product.factors.max_rank
    for token, slot in enumerate(token_slots):
        if slot < len(b):
            s = product.shrunk[token].view(len(b), 2, max_rank)[slot]
            y[token] += torch.cat([s[part] @ b[slot].chunk(2, 1)[part] for part in range(2)])
    return y


def test_a_graph_s_expectation_is_what_a_batch_becomes():
    product, expected = open_product((64, 64), MIXED, RANKS, device=DEVICE)
    assert relative_error(summed(product, MIXED), expected) < BOUNDS[torch.float32]


def test_a_version_that_fuses_nothing_closes_the_product_first():
    product, expected = open_product((64, 64), MIXED, RANKS)

    def add(y: Tensor, *_: object) -> None:
        y.copy_(expected)

    product = replace(product, add=add)
    torch.testing.assert_close(reference.silu_multiply(product), reference.silu_multiply(expected))


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> LayerCache:
    shape = (6, kv_heads, 8, head_dim)
    keys, values = (torch.zeros(shape, device=DEVICE).to(dtype) for _ in range(2))
    return LayerCache(keys, values, torch.ones(*shape[:3], 2, device=DEVICE) if dtype is EIGHT_BITS else None)


def step_of(rows: Tensor) -> DeviceStep:
    nobody, tokens = int32([], DEVICE), len(rows)
    positions, addresses = torch.randint(50, (tokens,)).to(DEVICE), torch.randperm(48)[:tokens].to(DEVICE)
    return DeviceStep(positions, positions, addresses, nobody, nobody, nobody)
