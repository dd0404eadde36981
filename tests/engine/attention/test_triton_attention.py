"""Triton's paged attention against softmax in float64: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.attention.paged import (
    as_computed,
    attend,
    decode_step,
    paged_cache,
    prefill_step,
    rounded,
    without_left,
)
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

triton_attention = load("rota.engine.attention.triton_attention")
triton_tuning = load("rota.engine.attention.triton_attention")
DecodeTuning, PrefillTuning = triton_tuning.DecodeTuning, triton_tuning.PrefillTuning
choose_programs, Bounds = triton_tuning.choose_programs, triton_tuning.CutBounds
TritonAttention = triton_attention.TritonAttention

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Small tiles: loops of several tiles without long sequences.
SMALL_DECODE = DecodeTuning(tile=32, stages=2)
SMALL_PREFILL = PrefillTuning(queries=32, tile=32, warps=4, stages=2)
# As many processors as there are programs at once, and a row that has more than its share of them is cut.
CUTTING = {"programs": 1, "shortest": 32, "spare": 0, "stages": 2}
CUTS = {
    "whole": DecodeTuning(tile=32, stages=2, spare=10_000, apart=0),
    "cut": DecodeTuning(tile=32, processors=16, apart=0, resident=1, **CUTTING),
    "cut and combined apart": DecodeTuning(tile=32, processors=16, apart=8, spare_of_few=0, **CUTTING),
}

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


@pytest.mark.parametrize(
    ("shape", "cut", "held"),
    [(shape, "cut", held) for shape in SHAPES for held in (as_computed, rounded)]
    + [(SHAPES[4], cut, as_computed) for cut in CUTS if cut != "cut"],
)
def test_a_decode_attends_to_all_its_row_has_cached(shape, cut, held):
    kv_heads, group, head_dim, block_size, dtype = shape
    cache = held(paged_cache([1, 17, 150, 64], kv_heads, head_dim, block_size, dtype, DEVICE))
    rows = [2, 0, 3, 1]
    query = random_query(len(rows), kv_heads * group, head_dim, dtype)
    attention = TritonAttention(head_dim**-0.5, CUTS[cut])

    found = attention.decode(query, cache.layer, decode_step(cache, rows))

    for index, row in enumerate(rows):
        last = cache.dense_keys[row].shape[0] - 1
        expected = attend(query[index : index + 1], cache, row, last, head_dim**-0.5)
        assert relative_error(found[index : index + 1], expected) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("shape", "held"), [*((shape, as_computed) for shape in SHAPES), *((shape, rounded) for shape in SHAPES[3:])]
)
def test_chunks_attend_to_their_cached_prefix_and_causally_to_themselves(shape, held):
    kv_heads, group, head_dim, block_size, dtype = shape
    cache = held(paged_cache([40, 3, 130, 1, 77], kv_heads, head_dim, block_size, dtype, DEVICE))
    # no prefix, a whole short row, a prefix that ends inside a block, one token, the middle of a row
    chunks = [(0, 0, 40), (1, 0, 3), (2, 101, 29), (3, 0, 1), (4, 31, 20)]
    query = random_query(sum(length for _, _, length in chunks), kv_heads * group, head_dim, dtype)
    attention = TritonAttention(scale=head_dim**-0.5, prefill_tuning=SMALL_PREFILL)

    found = attention.prefill(query, cache.layer, prefill_step(cache, chunks))

    first = 0
    for row, start, length in chunks:
        expected = attend(query[first : first + length], cache, row, start, head_dim**-0.5)
        assert relative_error(found[first : first + length], expected) < BOUNDS[dtype]
        first += length


@pytest.mark.parametrize("held", [as_computed, rounded])
def test_the_default_tiles_serve_the_shape_they_were_chosen_for(held):
    cache = held(paged_cache([150, 70], 1, 128, 16, torch.bfloat16, DEVICE))
    attention = TritonAttention(scale=0.1)
    query = random_query(2, 4, 128, torch.bfloat16)
    found = attention.decode(query, cache.layer, decode_step(cache, [0, 1]))
    assert relative_error(found[:1], attend(query[:1], cache, 0, 149, 0.1)) < 1e-2
    assert relative_error(found[1:], attend(query[1:], cache, 1, 69, 0.1)) < 1e-2

    query = random_query(60, 4, 128, torch.bfloat16)
    found = attention.prefill(query, cache.layer, prefill_step(cache, [(0, 110, 40), (1, 50, 20)]))
    assert relative_error(found[:40], attend(query[:40], cache, 0, 110, 0.1)) < 1e-2
    assert relative_error(found[40:], attend(query[40:], cache, 1, 50, 0.1)) < 1e-2


@pytest.mark.parametrize("cut", CUTS)
def test_a_padding_row_gets_zeros_and_disturbs_nobody(cut):
    cache = paged_cache([50], 2, 64, 16, torch.float32, DEVICE)
    query = random_query(2, 4, 64, torch.float32)
    attention = TritonAttention(0.125, CUTS[cut])

    found = attention.decode(query, cache.layer, decode_step(cache, [-1, 0]))

    assert found[0].eq(0).all()
    assert relative_error(found[1:], attend(query[1:], cache, 0, 49, 0.125)) < 1e-5


def test_a_key_or_value_that_is_not_a_number_in_eight_bits_shows_in_its_own_row_alone():
    cache = rounded(paged_cache([50, 40, 30], 1, 64, 16, torch.float32, DEVICE))
    assert cache.scales is not None
    cache.scales[cache.tables[0, 1].item(), 0, 3, 0] = torch.nan
    cache.scales[cache.tables[1, 0].item(), 0, 0, 1] = torch.nan
    query = random_query(3, 4, 64, torch.float32)

    found = TritonAttention(0.125, SMALL_DECODE).decode(query, cache.layer, decode_step(cache, [0, 1, 2]))

    assert found[:2].isnan().all()
    assert relative_error(found[2:], attend(query[2:], cache, 2, 29, 0.125)) < 1e-5


@pytest.mark.parametrize("size", [2.0**-13, 2.0**18])
def test_queries_and_values_of_any_size_attend_to_codes_in_float16_s_range(size):
    """On a GPU codes are multiplied in float16; queries are brought into its range, and values are lifted."""
    exact = paged_cache([150, 64], 1, 128, 16, torch.bfloat16, DEVICE)
    dense = tuple(values * size for values in exact.dense_values)
    cache = rounded(replace(exact, values=exact.values * size, dense_values=dense))
    query = random_query(2, 4, 128, torch.bfloat16) * 1e6
    found = TritonAttention(1e-7).decode(query, cache.layer, decode_step(cache, [0, 1]))
    for row, last in ((0, 149), (1, 63)):
        assert relative_error(found[row : row + 1], attend(query[row : row + 1], cache, row, last, 1e-7)) < 1e-2


def test_layers_share_a_step_s_shares_and_leave_no_trace():
    """More entries than programs, so the list is handed out anew to every layer; a row of its own window between."""
    cache = paged_cache([200, 90, 5], 1, 64, 16, torch.float32, DEVICE)
    query = random_query(3, 2, 64, torch.float32)
    attention = TritonAttention(0.125, CUTS["cut"])
    step = decode_step(cache, [0, 1, 2])

    found = [attention.decode(query, cache.layer, step, window) for window in (0, 33, 0, 33, 0)]

    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[4])
    assert torch.equal(found[1], found[3])
    for row, length in enumerate((200, 90, 5)):
        assert (
            relative_error(found[4][row : row + 1], attend(query[row : row + 1], cache, row, length - 1, 0.125)) < 1e-5
        )


@st.composite
def tunings(draw: st.DrawFn) -> dict[str, int]:
    """How finely units are cut, in every combination that may come up."""
    return {
        "processors": draw(st.integers(1, 24)),
        "programs": draw(st.integers(1, 3)),
        "cuts": draw(st.integers(1, 4)),
        "shortest": draw(st.sampled_from([32, 96])),
        "most_pieces": draw(st.integers(1, 9)),
        "spare": draw(st.sampled_from([0, 40])),
        "fits": draw(st.booleans()),
        "stages": 2,
    }


LENGTHS = st.lists(st.integers(1, 260), min_size=1, max_size=5)
WINDOWS = st.sampled_from([0, 1, 7, 33, 100, 1000])
HELD = st.sampled_from([as_computed, rounded])


@settings(max_examples=14)
@given(LENGTHS, WINDOWS, tunings(), st.integers(1, 4), st.sampled_from([0, 8]), st.sampled_from([8, 16]), HELD)
def test_rows_of_any_lengths_and_window_attend_the_same_however_they_are_cut(
    lengths, window, tuning, resident, apart, block_size, held
):
    whole = held(paged_cache(lengths, 2, 32, block_size, torch.float32, DEVICE))
    cache = without_left(whole, [length - window for length in lengths] if window else [])
    query = random_query(len(lengths), 6, 32, torch.float32)
    attention = TritonAttention(0.125, DecodeTuning(tile=64, resident=resident, apart=apart, spare_of_few=0, **tuning))

    found = attention.decode(query, cache.layer, decode_step(cache, list(range(len(lengths)))), window)

    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        assert relative_error(found[own], attend(query[own], cache, row, length - 1, 0.125, window)) < 1e-5


@pytest.mark.parametrize("held", [as_computed, rounded])
def test_many_rows_attend_as_few_do_though_their_programs_differ(held):
    rows = triton_tuning.FEW_ROWS + 1
    lengths = [1 + 7 * row % 20 for row in range(rows - 1)] + [300]
    cache = held(paged_cache(lengths, 1, 32, 16, torch.float32, DEVICE))
    query = random_query(rows, 2, 32, torch.float32)

    found = TritonAttention(0.125).decode(query, cache.layer, decode_step(cache, list(range(rows))))

    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        assert relative_error(found[own], attend(query[own], cache, row, length - 1, 0.125)) < 1e-5


CHUNKS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=3)


@settings(max_examples=10)
@given(CHUNKS, WINDOWS, tunings(), st.sampled_from([8, 16]), HELD)
def test_chunks_behind_any_prefix_attend_the_same_however_they_are_cut(chunks, window, tuning, block_size, held):
    whole = held(paged_cache([sum(chunk) for chunk in chunks], 2, 32, block_size, torch.float32, DEVICE))
    cache = without_left(whole, [start - window + 1 for start, _ in chunks] if window else [])
    query = random_query(sum(length for _, length in chunks), 6, 32, torch.float32)
    attention = TritonAttention(0.125, None, PrefillTuning(queries=32, tile=64, warps=4, **tuning))
    step = prefill_step(cache, [(row, start, length) for row, (start, length) in enumerate(chunks)])

    found = attention.prefill(query, cache.layer, step, window)

    first = 0
    for row, (start, length) in enumerate(chunks):
        own = slice(first, first + length)
        first += length
        assert relative_error(found[own], attend(query[own], cache, row, start, 0.125, window)) < 1e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU; CI has none")
@pytest.mark.parametrize("held", [as_computed, rounded])
def test_a_graph_captured_for_one_partition_serves_another(held):
    """Captured while every row has a token, as the engine does; then one row is very long, then another, then none."""
    lengths = [600] * 15 + [20_000, 9_000]
    cache = held(paged_cache(lengths, 8, 128, 16, torch.bfloat16, DEVICE))
    query = random_query(len(lengths), 32, 128, torch.bfloat16)
    attention = TritonAttention(0.1)
    step = decode_step(cache, list(range(len(lengths))))
    step.decode_lengths.fill_(1)
    attention.decode(query, cache.layer, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [attention.decode(query, cache.layer, step) for _ in range(3)]
    for now in (lengths, [600] * 16 + [9_000], [1] * 17, [20 * row + 1 for row in range(17)], lengths):
        step.decode_lengths.copy_(torch.tensor(now))
        graph.replay()
        for row, length in enumerate(now):
            short = replace(
                cache,
                dense_keys=tuple(k[:length] for k in cache.dense_keys),
                dense_values=tuple(v[:length] for v in cache.dense_values),
            )
            expected = attend(query[row : row + 1], short, row, length - 1, 0.1)
            assert all(relative_error(layer[row : row + 1], expected) < 1e-2 for layer in layers)


def test_a_grid_has_as_many_programs_as_run_at_once_or_full_rounds_of_rows():
    bounds = Bounds(slots=66, cuts=2, shortest=320, most_pieces=64, spare=256)
    assert choose_programs(64, bounds, resident=82) == 82
    assert choose_programs(128, bounds, resident=82) == 64
    assert choose_programs(1, replace(bounds, slots=4), resident=82) == 9
