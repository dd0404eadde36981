"""Triton's paged attention against softmax in float64: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

from tests.engine.attention.paged import attend, decode_step, paged_cache, prefill_step, relative_error
from tests.engine.triton_interpreter import DEVICE, load

triton_attention = load("rota.engine.attention.triton_attention")
DecodeTuning, PrefillTuning = triton_attention.DecodeTuning, triton_attention.PrefillTuning
TritonAttention, choose_splits = triton_attention.TritonAttention, triton_attention.choose_splits

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Small tiles: loops of several tiles without long sequences.
SMALL_DECODE = DecodeTuning(tile=32, stages=2)
SMALL_PREFILL = PrefillTuning(queries=32, tile=32, warps=4, stages=2)

SHAPES = [
    # kv_heads, group, head_dim, block_size, dtype
    (2, 1, 64, 8, torch.float32),
    (1, 3, 64, 16, torch.bfloat16),
    (2, 4, 128, 16, torch.bfloat16),
    (1, 8, 128, 32, torch.float16),
    (2, 3, 80, 16, torch.float32),
    (1, 4, 96, 8, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def random_query(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, heads, head_dim).to(dtype).to(DEVICE)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size", "dtype"), SHAPES)
def test_a_decode_attends_to_all_its_row_has_cached(kv_heads, group, head_dim, block_size, dtype, splits):
    cache = paged_cache([1, 17, 150, 64], kv_heads, head_dim, block_size, dtype, DEVICE)
    rows = [2, 0, 3, 1]
    query = random_query(len(rows), kv_heads * group, head_dim, dtype)
    attention = TritonAttention(scale=head_dim**-0.5, decode_tuning=DecodeTuning(tile=32, stages=2, splits=splits))

    found = attention.decode(query, cache.keys, cache.values, decode_step(cache, rows))

    for index, row in enumerate(rows):
        last = cache.dense_keys[row].shape[0] - 1
        expected = attend(query[index : index + 1], cache, row, last, head_dim**-0.5)
        assert relative_error(found[index : index + 1], expected) < BOUNDS[dtype]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size", "dtype"), SHAPES)
def test_chunks_attend_to_their_cached_prefix_and_causally_to_themselves(kv_heads, group, head_dim, block_size, dtype):
    cache = paged_cache([40, 3, 130, 1, 77], kv_heads, head_dim, block_size, dtype, DEVICE)
    # no prefix, a whole short row, a prefix that ends inside a block, one token, the middle of a row
    chunks = [(0, 0, 40), (1, 0, 3), (2, 101, 29), (3, 0, 1), (4, 31, 20)]
    query = random_query(sum(length for _, _, length in chunks), kv_heads * group, head_dim, dtype)
    attention = TritonAttention(scale=head_dim**-0.5, prefill_tuning=SMALL_PREFILL)

    found = attention.prefill(query, cache.keys, cache.values, prefill_step(cache, chunks))

    first = 0
    for row, start, length in chunks:
        expected = attend(query[first : first + length], cache, row, start, head_dim**-0.5)
        assert relative_error(found[first : first + length], expected) < BOUNDS[dtype]
        first += length


def test_the_default_tiles_serve_the_shape_they_were_chosen_for():
    cache = paged_cache([300, 140], 1, 128, 16, torch.bfloat16, DEVICE)
    attention = TritonAttention(scale=0.1)
    query = random_query(2, 4, 128, torch.bfloat16)
    found = attention.decode(query, cache.keys, cache.values, decode_step(cache, [0, 1]))
    assert relative_error(found[:1], attend(query[:1], cache, 0, 299, 0.1)) < 1e-2
    assert relative_error(found[1:], attend(query[1:], cache, 1, 139, 0.1)) < 1e-2

    query = random_query(140, 4, 128, torch.bfloat16)
    found = attention.prefill(query, cache.keys, cache.values, prefill_step(cache, [(0, 200, 100), (1, 100, 40)]))
    assert relative_error(found[:100], attend(query[:100], cache, 0, 200, 0.1)) < 1e-2
    assert relative_error(found[100:], attend(query[100:], cache, 1, 100, 0.1)) < 1e-2


@pytest.mark.parametrize("splits", [1, 2])
def test_a_padding_row_gets_zeros_and_disturbs_nobody(splits):
    cache = paged_cache([50], 2, 64, 16, torch.float32, DEVICE)
    query = random_query(2, 4, 64, torch.float32)
    attention = TritonAttention(scale=0.125, decode_tuning=DecodeTuning(tile=32, splits=splits))

    found = attention.decode(query, cache.keys, cache.values, decode_step(cache, [-1, 0]))

    assert found[0].eq(0).all()
    assert relative_error(found[1:], attend(query[1:], cache, 0, 49, 0.125)) < 1e-5


@pytest.mark.parametrize("longest", [1, 4000])
def test_rows_shorter_or_longer_than_the_host_expected_are_still_right(longest):
    """A captured graph is launched with the split count of another step's lengths."""
    cache = paged_cache([200, 5], 1, 64, 16, torch.float32, DEVICE)
    query = random_query(2, 2, 64, torch.float32)
    attention = TritonAttention(scale=0.125, decode_tuning=SMALL_DECODE)

    found = attention.decode(query, cache.keys, cache.values, decode_step(cache, [0, 1], longest=longest))

    assert relative_error(found[:1], attend(query[:1], cache, 0, 199, 0.125)) < 1e-5
    assert relative_error(found[1:], attend(query[1:], cache, 1, 4, 0.125)) < 1e-5


def test_few_rows_are_cut_into_many_splits_and_many_rows_into_none():
    few = choose_splits(programs=8, longest=8000, tile=64, wanted=528, most=64)
    many = choose_splits(programs=512, longest=8000, tile=64, wanted=528, most=64)
    assert (few, many) == (64, 1)


def test_no_split_is_smaller_than_a_tile():
    assert choose_splits(programs=8, longest=130, tile=64, wanted=528, most=64) == 3
