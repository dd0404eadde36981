"""The CPU's operations beside the reference's: the same numbers in fewer calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rota.engine.kv_cache import CacheShape, KVCache
from rota.engine.layer_cache import EIGHT_BITS, LayerCache, from_eight_bits
from rota.engine.lora.batch import make_batch
from rota.engine.model.rotary import RotarySpec, rotary_table
from rota.engine.ops.cpu import CPUOperations
from rota.engine.ops.reference import Operations
from rota.engine.step.device_step import DeviceStep, int32
from tests.engine.nearness import relative_error

reference = Operations()

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 16, 8
BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def step_of(positions: list[int], slots: list[int], has_adapters: bool = False) -> DeviceStep:
    nothing = int32([])
    adapters = make_batch(np.zeros(len(slots), np.int32), 1, torch.device("cpu"))
    return DeviceStep(
        torch.zeros(len(slots), dtype=torch.int64),
        torch.tensor(positions),
        torch.tensor(slots),
        nothing,
        nothing,
        nothing,
        0,
        lora=adapters if has_adapters else None,
    )


def layer(keys_and_values: Tensor) -> LayerCache:
    return LayerCache(keys=keys_and_values[0], values=keys_and_values[1])


def in_eight_bits_of(blocks: int) -> LayerCache:
    shape = CacheShape(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=EIGHT_BITS)
    return KVCache(blocks - 1, shape, torch.device("cpu")).layers[0]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotating_and_storing_does_what_the_reference_does(dtype, has_norms):
    rotary = rotary_table(RotarySpec(10_000.0), HEAD_DIM, 64)
    norms = (torch.rand(HEAD_DIM).to(dtype), torch.rand(HEAD_DIM).to(dtype), 1e-6) if has_norms else None
    operations = CPUOperations()
    for positions, slots in (([5], [19]), ([63, 0, 7], [39, 8, 0]), ([1, 0, 7], [39, 8, 1])):
        qkv = torch.randn(len(slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
        expected_cache, found_cache = torch.zeros(2, 2, 5, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
        step = step_of(positions, slots)
        expected = reference.rotate_and_store(qkv, rotary, step, layer(expected_cache), norms)
        found = operations.rotate_and_store(qkv, rotary, step, layer(found_cache), norms)
        assert found.shape == expected.shape == (len(slots), HEADS, HEAD_DIM)
        assert relative_error(found, expected) < BOUNDS[dtype]
        assert relative_error(found_cache, expected_cache) < BOUNDS[dtype]
        assert torch.equal(found_cache[1], expected_cache[1])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("operations", [CPUOperations(), reference], ids=["cpu", "reference"])
def test_what_adapters_store_is_finite_and_otherwise_as_it_was(operations, dtype):
    rotary = rotary_table(RotarySpec(10_000.0), HEAD_DIM, 64)
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    well = qkv.clone()
    largest = torch.finfo(dtype).max
    qkv[1, -1], qkv[2], qkv[3, -3 * HEAD_DIM :] = torch.nan, torch.inf, largest
    caches = torch.zeros(2, 2, 5, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    for cache, rows in zip(caches, (well, qkv), strict=True):
        step = step_of([3, 4, 5, 6], [0, 1, 2, 3], has_adapters=True)
        operations.rotate_and_store(rows, rotary, step, layer(cache), None)

    expected, found = caches[0], caches[1]
    assert found.isfinite().all()
    assert (found.float().abs() <= 2e30).all()
    assert torch.equal(found[:, 0, :, 0], expected[:, 0, :, 0])
    assert torch.equal(found[0, 0, :, 1], expected[0, 0, :, 1])


def test_sixteen_bits_of_range_too_short_for_a_model_are_stored_finite_without_adapters_too():
    rotary = rotary_table(RotarySpec(10_000.0), HEAD_DIM, 64)
    qkv = torch.full((1, (HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.inf, dtype=torch.float16)
    cache = torch.zeros(2, 5, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.float16)
    CPUOperations().rotate_and_store(qkv, rotary, step_of([3], [0]), layer(cache), None)
    assert cache.isfinite().all()
    assert cache.any()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_norms_of_rows_large_and_small_are_the_reference_s(dtype):
    operations, weights = CPUOperations(), [torch.rand(64).to(dtype) for _ in range(3)]
    x = (torch.randn(5, 64) * torch.tensor([1e-3, 0.1, 1.0, 10.0, 100.0])[:, None]).to(dtype)
    for weight in weights:
        found, expected = operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
        assert found.is_contiguous()
        assert relative_error(found, expected) < BOUNDS[dtype]


def test_the_small_operations_do_what_the_reference_does():
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)
    operations = CPUOperations()
    torch.testing.assert_close(operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(operations.silu_multiply(x), reference.silu_multiply(x))
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(operations.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_cache_in_eight_bits_gets_what_the_reference_gives_it(dtype):
    rotary = rotary_table(RotarySpec(10_000.0), HEAD_DIM, 64)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    qkv[0, -HEAD_DIM:] = 0.0
    step, found, expected = step_of([63, 0, 7], [39, 8, 0]), in_eight_bits_of(5), in_eight_bits_of(5)
    CPUOperations().rotate_and_store(qkv, rotary, step, found, None)
    reference.rotate_and_store(qkv, rotary, step, expected, None)

    assert torch.equal(found.scales[..., 1], expected.scales[..., 1])
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert found.scales[4, 1, 7, 1] == 1.0  # of zeros
    assert found.scales.count_nonzero() == 2 * 3 * KV_HEADS
    keys = [from_eight_bits(cache.keys, cache.scales[..., 0], torch.float32) for cache in (found, expected)]
    assert relative_error(*keys) < 0.01  # a key that the two round differently is a step apart


@pytest.mark.parametrize("operations", [CPUOperations(), reference], ids=["cpu", "reference"])
def test_what_adapters_store_in_eight_bits_is_finite_too(operations):
    """As in other precisions: torch's attention reads it for other sequences, and no mask hides a NaN."""
    rotary = rotary_table(RotarySpec(10_000.0), HEAD_DIM, 64)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    qkv[0, -1], qkv[1], qkv[2, -3 * HEAD_DIM :] = torch.nan, torch.inf, torch.finfo(torch.float32).max
    cache = in_eight_bits_of(5)
    operations.rotate_and_store(qkv, rotary, step_of([3, 4, 5], [0, 1, 2], has_adapters=True), cache, None)
    for place, codes in enumerate((cache.keys, cache.values)):
        found = from_eight_bits(codes, cache.scales[..., place], torch.float32)
        assert found.isfinite().all()
        assert (found.abs() <= 2e30).all()
