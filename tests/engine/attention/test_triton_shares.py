"""Shares cover every key of every unit once, in a list that never outgrows its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.engine.step.device_step import int32
from tests.engine.triton_interpreter import DEVICE, load

triton_shares = load("rota.engine.attention.triton_shares")
Bounds, ENTRY = triton_shares.CutBounds, triton_shares.ENTRY
TILE = 32
LLAMA = Bounds(slots=66, cuts=2, shortest=320, most_pieces=64, spare=256)  # four programs a processor of an H200
AT_ONCE = Bounds(slots=132, cuts=1, shortest=96, most_pieces=64, spare=256, fits=True)  # eight


def share_out(lengths: list[int], bounds: Any, window: int = 0) -> tuple[list[list[int]], int]:
    """The list's entries, and how many of them are pieces."""
    size = bounds.numbers(len(lengths))
    shares = torch.full((size + 1,), -7, dtype=torch.int32, device=DEVICE)
    ranges, taken = (torch.full((count,), -7, dtype=torch.int32, device=DEVICE) for count in (2 * len(lengths), 4))
    triton_shares.share_decodes[(1,)](
        shares, ranges, taken, int32(list(range(100, 100 + len(lengths))), DEVICE), int32(lengths, DEVICE),
        len(lengths), window, *bounds.arguments, UNITS=256, KV_HEADS=4, TILE=TILE, FITS=bounds.fits,
    )  # fmt: skip
    assert shares[size] == -7
    assert taken.tolist() == [0] * 4
    count, pieces = shares[:2].tolist()
    entries = shares[ENTRY : ENTRY * (count + 1)].view(count, ENTRY).tolist()
    assert [ranges[2 * unit + 1].item() for unit, *_ in entries] == [entry[5] for entry in entries]
    return entries, pieces


BOUNDS = st.builds(
    Bounds,
    slots=st.integers(1, 80),
    cuts=st.integers(1, 5),
    shortest=st.integers(1, 300),
    most_pieces=st.integers(1, 70),
    spare=st.integers(0, 300),
    fits=st.booleans(),
)
LENGTHS = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 131_072)), min_size=1, max_size=64)


@settings(max_examples=50)
@given(LENGTHS, BOUNDS, st.sampled_from([0, 1, 100, 4096]))
def test_every_key_of_every_row_is_in_one_share_and_long_shares_come_first(lengths, bounds, window):
    entries, pieces = share_out(lengths, bounds, window)

    assert len(entries) <= bounds.shares(len(lengths))
    assert pieces <= bounds.pieces
    numbers = []
    for decode, length in enumerate(lengths):
        mine = sorted(entry[2:7] for entry in entries if entry[0] == decode)
        assert {entry[1] for entry in entries if entry[0] == decode} == {100 + decode}
        low = max(0, length - window) if window else 0
        assert [low, *(end for _, end, *_ in mine)] == [*(begin for begin, *_ in mine), length]
        assert 1 <= len(mine) <= max(1, bounds.most_pieces)
        assert {(first, count) for _, _, first, count, _ in mine} == {(mine[0][2], len(mine))}
        if len(mine) > 1:
            numbers += [number for *_, number in mine]
            assert [number for *_, number in mine] == list(range(mine[0][2], mine[0][2] + len(mine)))
            assert len({-(-(end - begin) // TILE) for begin, end, *_ in mine[:-1]}) == 1
    assert sorted(numbers) == list(range(pieces))

    spans = [end - begin for _, _, begin, end, *_ in entries]
    is_piece = [count > 1 for _, _, _, _, _, count, *_ in entries]
    longest = max((span for span, piece in zip(spans, is_piece, strict=True) if piece), default=0)
    order = [2 if piece else 3 if span > longest else 1 for span, piece in zip(spans, is_piece, strict=True)]
    assert sum(is_piece) == pieces
    assert order == sorted(order, reverse=True)


@settings(max_examples=15)
@given(LENGTHS)
def test_no_share_is_much_above_fair(lengths):
    entries, _ = share_out(lengths, LLAMA)
    fair = -(-sum(lengths) // LLAMA.slots)
    longest = max(lengths)
    for _, _, begin, end, *_ in entries:
        # What a unit cut into as many pieces as it may have cannot avoid, a tile's rounding, and what is not worth it.
        assert end - begin <= max(fair + fair // 16 + LLAMA.spare, -(-longest // LLAMA.most_pieces) + TILE)


def test_rows_of_one_length_stay_whole_and_a_long_one_among_them_is_cut():
    for lengths in ([600] * 64, [2000] * 64, [600] * 40):
        assert len(share_out(lengths, LLAMA)[0]) == len(lengths)
    entries, pieces = share_out([600] * 63 + [100_000], LLAMA)
    assert (len(entries), pieces) == (63 + 64, 64)
    entries, pieces = share_out([600] * 32, LLAMA)
    assert (len(entries), pieces) == (64, 64)
    entries, pieces = share_out([600], LLAMA)
    assert (len(entries), pieces) == (19, 19)


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 140))
def test_where_some_length_lets_all_shares_run_at_once_they_do(lengths, slots):
    bounds = replace(AT_ONCE, slots=slots)
    entries, _ = share_out(lengths, bounds)
    fair = max(-(-sum(lengths) // slots), bounds.shortest)
    longest = max(TILE, int(3.3 * fair) // TILE * TILE)  # lengths of up to 3.36 times a fair one are tried
    if sum(max(1, -(-length // longest)) for length in lengths) <= slots:
        assert len(entries) <= slots
        bound = max(3.37 * fair + TILE, -(-max(lengths) // bounds.most_pieces) + TILE)
        assert max(end - begin for _, _, begin, end, *_ in entries) <= bound


@pytest.mark.parametrize(
    ("lengths", "shares", "longest"),
    [
        ([600] * 64, 128, 320),  # 291 tokens are fair, so two pieces each
        ([700] * 48, 96, 352),  # 255 are, but three pieces each would be 144
        ([600] * 80, 80, 600),  # two pieces each would be 160
        ([700] * 63 + [7300], 63 + 10, 736),
        ([1000] * 30 + [8000] * 2, 3 * 30 + 2 * 20, 416),
        ([600] * 140, 140, 600),  # they cannot run at once anyway
    ],
)
def test_shares_are_as_short_as_they_can_be_if_all_are_to_run_at_once(lengths, shares, longest):
    entries, _ = share_out(lengths, AT_ONCE)
    assert (len(entries), max(end - begin for _, _, begin, end, *_ in entries)) == (shares, longest)
