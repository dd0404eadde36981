"""The cache is as large as asked, or as memory allows; in eight bits each vector has a scale of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import CacheConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory
from rota.engine.kv_cache import CacheShape, KVCache, choose_cache_dtype, count_blocks
from rota.engine.layer_cache import EIGHT_BITS, from_eight_bits, in_eight_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
MEBIBYTE = 1 << 20


EIGHT = replace(SHAPE, dtype=torch.float8_e4m3fn)


def count(
    config: CacheConfig | None = None,
    total: int = 512 * MEBIBYTE,
    taken: int = 0,
    device: torch.device = CUDA,
    context: int = 1024,
    rows: int = 100,
    shape: CacheShape = SHAPE,
) -> int:
    return count_blocks(config or CacheConfig(), shape, DeviceMemory(total, taken), device, context, rows)


def test_a_block_holds_keys_and_values_of_all_layers():
    assert SHAPE.block_bytes == 2 * 2 * 2 * 64 * 16 * 2


def test_the_memory_share_holds_weights_and_blocks_and_one_scratch_block():
    config = CacheConfig(mem_fraction_static=0.5)
    assert count(config, taken=56 * MEBIBYTE) == 200 * MEBIBYTE // SHAPE.block_bytes - 1


def test_by_default_a_gpu_gives_most_of_its_memory_and_a_cpu_a_quarter():
    assert count() == int(0.88 * 512 * MEBIBYTE) // SHAPE.block_bytes - 1
    assert count(device=CPU, rows=1000) == 128 * MEBIBYTE // SHAPE.block_bytes - 1


def test_on_a_cpu_there_are_never_more_blocks_than_all_rows_could_use():
    assert count(device=CPU, context=1000, rows=3) == 3 * 63


def test_a_number_of_blocks_that_was_asked_for_is_given():
    assert count(CacheConfig(kv_blocks=2)) == 2


def test_more_blocks_than_memory_holds_are_refused_with_the_number_that_fits():
    with pytest.raises(ConfigError, match=r"kv_blocks is 100000.*512 MiB only 502 MiB are free; 32127 blocks"):
        count(CacheConfig(kv_blocks=100_000), taken=10 * MEBIBYTE)


def test_a_share_too_small_for_one_request_is_refused_with_numbers_and_what_helps():
    with pytest.raises(ConfigError) as refusal:
        count(CacheConfig(mem_fraction_static=0.5), taken=256 * MEBIBYTE - 10 * SHAPE.block_bytes)
    sentence = str(refusal.value)
    assert "would hold 144 tokens, less than one request of 512" in sentence
    assert "0.5 of 512 MiB is 256 MiB" in sentence
    assert "Raise mem_fraction_static" in sentence


def test_a_model_of_short_context_needs_room_for_no_more_than_that():
    room = 4 * SHAPE.block_bytes
    assert count(CacheConfig(mem_fraction_static=0.5), taken=256 * MEBIBYTE - room, context=48) == 3


def test_the_scratch_block_lies_behind_those_of_the_ledger():
    cache = KVCache(5, SHAPE, CPU)
    keys, values = cache.layers[1].keys, cache.layers[1].values
    assert len(cache.layers) == 2
    assert keys.shape == values.shape == (6, 2, 16, 64)
    assert keys.dtype is torch.bfloat16
    assert not keys.any()
    assert not values.any()
    assert cache.scratch_block == 5
    keys[5, 1, 15, 63] = 1.0
    assert values.count_nonzero() == 0


def test_in_eight_bits_a_block_counts_its_scales_and_memory_holds_nearly_twice_as_many():
    assert EIGHT.block_bytes == 2 * 2 * 2 * 16 * (64 + 4)
    assert count(shape=EIGHT) / count() == pytest.approx(2 * 64 / (64 + 4), rel=1e-3)
    wide = replace(EIGHT, head_dim=128)
    assert replace(SHAPE, head_dim=128).block_bytes / wide.block_bytes == pytest.approx(1.939, abs=1e-3)


def test_a_cache_in_eight_bits_takes_what_its_blocks_count():
    layers = KVCache(5, EIGHT, CPU).layers
    assert layers[0].keys.dtype is torch.float8_e4m3fn
    parts = [part for one in layers for part in (one.keys, one.values, one.scales)]
    assert sum(part.nbytes for part in parts) == 6 * EIGHT.block_bytes


EIGHT_BITS_ASKED = CacheConfig(kv_cache_dtype="fp8")


def test_keys_and_values_have_the_model_s_precision_unless_eight_bits_are_asked_for():
    assert choose_cache_dtype(CacheConfig(), torch.bfloat16, "flashinfer", CUDA) is torch.bfloat16
    assert choose_cache_dtype(EIGHT_BITS_ASKED, torch.bfloat16, "torch", CPU) is torch.float8_e4m3fn


def test_flashinfer_is_refused_keys_in_eight_bits_with_what_works():
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8'.*FlashInfer.*--attention-backend triton"):
        choose_cache_dtype(EIGHT_BITS_ASKED, torch.bfloat16, "flashinfer", CUDA)


@pytest.mark.parametrize(("capability", "works"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_numbers_of_eight_bits_is_refused_them(capability, works, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    if works:
        assert choose_cache_dtype(EIGHT_BITS_ASKED, torch.bfloat16, "triton", CUDA) is torch.float8_e4m3fn
        return
    with pytest.raises(
        ConfigError, match=rf"needs .* 8\.9 or higher, but this one has {capability[0]}\.{capability[1]}"
    ):
        choose_cache_dtype(EIGHT_BITS_ASKED, torch.bfloat16, "triton", CUDA)


# Vectors in eight bits: each has a scale of its own, and none of any size is lost.

# Three bits behind the leading one: half a step is a sixteenth of a number, and near zero half of 2**-9 of a scale.
STEP, SMALLEST_STEP = 2.0**-4, 2.0**-10


@settings(max_examples=50)
@given(st.integers(-90, 90), st.integers(0, 1000))
def test_every_number_is_within_a_sixteenth_of_itself_or_the_smallest_step_of_its_vector(exponent, seed):
    vectors = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = in_eight_bits(vectors)
    error = (from_eight_bits(codes, scales, torch.float32) - vectors).abs()
    assert codes.dtype is EIGHT_BITS
    assert (error <= 1.001 * torch.maximum(STEP * vectors.abs(), SMALLEST_STEP * scales[:, None])).all()


def test_the_largest_number_of_a_vector_is_kept_as_it_is():
    vectors = torch.tensor([[3.0, -7.0, 0.5], [0.001, 0.0, -0.002]])
    found = from_eight_bits(*in_eight_bits(vectors), torch.float32)
    torch.testing.assert_close(found[[0, 1], [1, 2]], vectors[[0, 1], [1, 2]])


def test_a_vector_of_zeros_has_a_scale_of_one():
    codes, scales = in_eight_bits(torch.zeros(2, 3, 16))
    assert (scales == 1.0).all()
    assert not from_eight_bits(codes, scales, torch.float32).any()


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38, 1e-32])
def test_vectors_next_to_nothing_stay_numbers(tiny):
    codes, scales = in_eight_bits(torch.full((1, 8), tiny))
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert (from_eight_bits(codes, scales, torch.float32).abs() <= 1.1 * tiny).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_reads_as_not_a_number(bad):
    vectors = torch.ones(2, 8)
    vectors[0, 3] = bad
    found = from_eight_bits(*in_eight_bits(vectors), torch.bfloat16)
    assert found[0].isnan().all()
    assert found[1].eq(1.0).all()
