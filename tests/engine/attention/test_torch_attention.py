"""Attention in plain torch against softmax in float64, over pages that lie in no order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rota.engine.attention.torch_attention import TorchAttention, split_by_length
from rota.engine.ops.reference import storable
from tests.engine.attention.paged import (
    PagedCache,
    attend,
    decode_step,
    paged_cache,
    prefill_step,
    relative_error,
)

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [
    # kv_heads, group, head_dim, block_size
    (3, 3, 64, 16),
    (2, 1, 32, 8),
    (1, 8, 128, 32),
]


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def cache_of(lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> PagedCache:
    """Where nothing was written yet lies the worst that a sequence before can have left there."""
    cache = paged_cache(lengths, kv_heads, head_dim, block_size, dtype, "cpu")
    worst = float(storable(torch.tensor(torch.inf, dtype=dtype)))
    return replace(cache, keys=cache.keys.nan_to_num(worst), values=cache.values.nan_to_num(-worst))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [[2], [0], [2, 0, 3, 1], [1, 4]], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_a_decode_attends_to_all_its_row_has_cached(kv_heads, group, head_dim, block_size, rows, dtype):
    cache = cache_of([1, 17, 150, 64, 17], kv_heads, head_dim, block_size, dtype)
    query = torch.randn(len(rows), kv_heads * group, head_dim).to(dtype)
    found = TorchAttention(head_dim**-0.5).decode(query, cache.keys, cache.values, decode_step(cache, rows))
    assert found.shape == query.shape
    for index, row in enumerate(rows):
        last = cache.dense_keys[row].shape[0] - 1
        expected = attend(query[index : index + 1], cache, row, last, head_dim**-0.5)
        assert relative_error(found[index : index + 1], expected) < BOUNDS[dtype]


def test_rows_of_very_different_lengths_attend_in_several_calls_to_the_same_end():
    lengths = [3, 300, 5, 290, 40, 9]
    cache = cache_of(lengths, 2, 32, 8, torch.float32)
    query = torch.randn(len(lengths), 4, 32)
    step = decode_step(cache, list(range(len(lengths))))
    apart = TorchAttention(0.2, padding_per_call=40).decode(query, cache.keys, cache.values, step)
    together = TorchAttention(0.2, padding_per_call=10_000).decode(query, cache.keys, cache.values, step)
    torch.testing.assert_close(apart, together)


def test_batches_pad_no_more_than_they_may():
    assert split_by_length([3, 300, 5, 290, 40, 9], most_padding=40) == [[1, 3], [4, 5], [0, 2]]
    assert split_by_length([3, 300, 5, 290, 40, 9], most_padding=10_000) == [[0, 1, 2, 3, 4, 5]]
    assert split_by_length([7, 7, 7], most_padding=0) == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_chunks_attend_to_their_cached_prefix_and_causally_to_themselves(kv_heads, group, head_dim, block_size, dtype):
    cache = cache_of([40, 3, 130, 77], kv_heads, head_dim, block_size, dtype)
    chunks = [(2, 100, 30), (1, 0, 3), (3, 76, 1), (0, 0, 40)]
    query = torch.randn(sum(length for _, _, length in chunks), kv_heads * group, head_dim).to(dtype)
    found = TorchAttention(head_dim**-0.5).prefill(query, cache.keys, cache.values, prefill_step(cache, chunks))
    begin = 0
    for row, start, length in chunks:
        own = slice(begin, begin + length)
        begin += length
        dense = replace(
            cache,
            dense_keys=tuple(k[: start + length] if i == row else k for i, k in enumerate(cache.dense_keys)),
            dense_values=tuple(v[: start + length] if i == row else v for i, v in enumerate(cache.dense_values)),
        )
        expected = attend(query[own], dense, row, start, head_dim**-0.5)
        assert relative_error(found[own], expected) < BOUNDS[dtype]


def test_a_new_step_is_not_mistaken_for_the_last_one():
    cache = cache_of([20, 33], 1, 32, 8, torch.float32)
    attention, query = TorchAttention(0.2), torch.randn(1, 2, 32)
    first = attention.decode(query, cache.keys, cache.values, decode_step(cache, [0]))
    second = attention.decode(query, cache.keys, cache.values, decode_step(cache, [1]))
    assert relative_error(first, attend(query, cache, 0, 19, 0.2)) < 1e-5
    assert relative_error(second, attend(query, cache, 1, 32, 0.2)) < 1e-5
