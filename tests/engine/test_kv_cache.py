"""The cache is as large as asked, or as memory allows, and says with numbers when that is too little."""

from __future__ import annotations

import pytest
import torch

from rota.core.config import CacheConfig
from rota.core.errors import ConfigError
from rota.engine.device import DeviceMemory
from rota.engine.kv_cache import CacheShape, KVCache, count_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
MEBIBYTE = 1 << 20


def count(
    config: CacheConfig | None = None,
    total: int = 512 * MEBIBYTE,
    taken: int = 0,
    device: torch.device = CUDA,
    context: int = 1024,
    rows: int = 100,
) -> int:
    return count_blocks(config or CacheConfig(), SHAPE, DeviceMemory(total, taken), device, context, rows)


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
    keys, values = cache.layers[1]
    assert len(cache.layers) == 2
    assert keys.shape == values.shape == (6, 2, 16, 64)
    assert keys.dtype is torch.bfloat16
    assert not keys.any()
    assert not values.any()
    assert cache.scratch_block == 5
    keys[5, 1, 15, 63] = 1.0
    assert values.count_nonzero() == 0
