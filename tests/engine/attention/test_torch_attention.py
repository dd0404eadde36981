"""Attention in plain torch against softmax in float64, over pages that lie in no order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rota.engine.attention import torch_attention
from rota.engine.attention.torch_attention import TorchAttention, gather, split_by_length
from rota.engine.layer_cache import LayerCache
from rota.engine.ops.reference import storable
from tests.engine.attention.paged import (
    PagedCache,
    as_computed,
    attend,
    decode_step,
    paged_cache,
    prefill_step,
    rounded,
    without_left,
)
from tests.engine.nearness import relative_error

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [
    # kv_heads, group, head_dim, block_size
    (3, 3, 64, 16),
    (2, 1, 32, 8),
    (1, 8, 128, 32),
]
HELD = [as_computed, rounded]


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def cache_of(lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> PagedCache:
    """Where nothing was written yet lies the worst that a sequence before can have left there."""
    cache = paged_cache(lengths, kv_heads, head_dim, block_size, dtype, "cpu")
    worst = float(storable(torch.tensor(torch.inf, dtype=dtype)))
    return replace(cache, keys=cache.keys.nan_to_num(worst), values=cache.values.nan_to_num(-worst))


def poisoned(cache: PagedCache) -> PagedCache:
    """With one more block, the last, of what is not a number, so that reading it shows."""
    nan = torch.full_like(cache.keys[:1], torch.nan)
    return replace(cache, keys=torch.cat([cache.keys, nan]), values=torch.cat([cache.values, nan]))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [[2], [0], [2, 0, 3, 1], [1, 4]], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_a_decode_attends_to_all_its_row_has_cached(kv_heads, group, head_dim, block_size, rows, dtype, held):
    cache = held(cache_of([1, 17, 150, 64, 17], kv_heads, head_dim, block_size, dtype))
    query = torch.randn(len(rows), kv_heads * group, head_dim).to(dtype)
    found = TorchAttention(head_dim**-0.5).decode(query, cache.layer, decode_step(cache, rows))
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
    apart = TorchAttention(0.2, padding_per_call=40).decode(query, cache.layer, step)
    together = TorchAttention(0.2, padding_per_call=10_000).decode(query, cache.layer, step)
    torch.testing.assert_close(apart, together)


def test_batches_pad_no_more_than_they_may():
    assert split_by_length([3, 300, 5, 290, 40, 9], most_padding=40) == [[1, 3], [4, 5], [0, 2]]
    assert split_by_length([3, 300, 5, 290, 40, 9], most_padding=10_000) == [[0, 1, 2, 3, 4, 5]]
    assert split_by_length([7, 7, 7], most_padding=0) == [[0, 1, 2]]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_chunks_attend_to_their_cached_prefix_and_causally_to_themselves(
    kv_heads, group, head_dim, block_size, dtype, held
):
    cache = held(cache_of([40, 3, 130, 77], kv_heads, head_dim, block_size, dtype))
    chunks = [(2, 100, 30), (1, 0, 3), (3, 76, 1), (0, 0, 40)]
    query = torch.randn(sum(length for _, _, length in chunks), kv_heads * group, head_dim).to(dtype)
    found = TorchAttention(head_dim**-0.5).prefill(query, cache.layer, prefill_step(cache, chunks))
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
    first = attention.decode(query, cache.layer, decode_step(cache, [0]))
    second = attention.decode(query, cache.layer, decode_step(cache, [1]))
    assert relative_error(first, attend(query, cache, 0, 19, 0.2)) < 1e-5
    assert relative_error(second, attend(query, cache, 1, 32, 0.2)) < 1e-5


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("window", [1, 7, 40, 150, 1000])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_what_lies_before_a_window_is_not_seen(window, dtype, held):
    lengths = [1, 17, 150, 64, 17]
    chunks = [(2, 100, 50), (1, 0, 17), (3, 63, 1), (4, 5, 12)]
    whole = held(poisoned(cache_of(lengths, 2, 32, 8, dtype)))
    attention = TorchAttention(0.2, padding_per_call=60)

    cache = without_left(whole, [length - window for length in lengths])
    query = torch.randn(len(lengths), 6, 32).to(dtype)
    found = attention.decode(query, cache.layer, decode_step(cache, list(range(5))), window)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        assert relative_error(found[own], attend(query[own], cache, row, length - 1, 0.2, window)) < BOUNDS[dtype]

    starts = {row: start for row, start, _ in chunks}
    cache = without_left(whole, [starts.get(row, 0) - window + 1 for row in range(5)])
    query = torch.randn(sum(length for _, _, length in chunks), 6, 32).to(dtype)
    found = attention.prefill(query, cache.layer, prefill_step(cache, chunks), window)
    begin = 0
    for row, start, length in chunks:
        own = slice(begin, begin + length)
        begin += length
        assert relative_error(found[own], attend(query[own], cache, row, start, 0.2, window)) < BOUNDS[dtype]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("threads", [1, 7])
@pytest.mark.parametrize("window", [0, 2500])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_long_rows_are_read_in_pieces_and_nobody_is_padded_to_them(window, dtype, threads, held, monkeypatch):
    lengths = [30, 5003, 4096, 12, 2049]
    cache = held(cache_of(lengths, 2, 16, 16, dtype))
    query = torch.randn(len(lengths), 4, 16).to(dtype)
    gathered: list[int] = []

    def count(cache: LayerCache, pages: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        gathered.append(pages.numel() * 16 // 2)
        return gather(cache, pages, rows, dtype)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch_attention, "gather", count)
    monkeypatch.setattr(torch_attention, "gather", count)

    found = TorchAttention(0.25).decode(query, cache.layer, decode_step(cache, [0, 1, 2, 3, 4]), window)

    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        assert relative_error(found[own], attend(query[own], cache, row, length - 1, 0.25, window)) < BOUNDS[dtype]
    seen = sum(min(length, window or length) for length in lengths)
    assert sum(gathered) < seen + 100


@pytest.mark.parametrize("length", [1, 40, 400, 3000])
def test_in_eight_bits_attention_is_within_five_percent_of_that_over_exact_keys_and_values(length):
    exact = cache_of([length], 3, 64, 16, torch.float32)
    cache = rounded(exact)
    query = torch.randn(1, 9, 64)
    found = TorchAttention(0.125).decode(query, cache.layer, decode_step(cache, [0]))
    assert relative_error(found, attend(query, exact, 0, length - 1, 0.125)) < 0.05
