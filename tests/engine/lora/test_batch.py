"""Tokens are grouped by slot: what the kernels rely on holds for every assignment."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as some

from rota.engine.lora.batch import BatchFrame, make_batch, most_tiles, tile_table

CPU = torch.device("cpu")


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@some.composite
def assignments(draw) -> tuple[np.ndarray, int, int]:
    """Each token's slot (one past the last: base), the slots there are, the size of a tile."""
    slots = draw(some.integers(1, 6))
    return int32(draw(some.lists(some.integers(0, slots), max_size=60))), slots, draw(some.integers(1, 20))


@given(assignments())
def test_every_token_of_an_adapter_is_in_one_tile_of_its_slot_and_base_tokens_in_none(assignment):
    token_slots, slots, tile_size = assignment
    table, _ = tile_table(token_slots, slots, tile_size)
    seen = []
    for slot, start, count in zip(table["tile_slots"], table["tile_starts"], table["tile_counts"], strict=True):
        assert 1 <= count <= tile_size
        tokens = table["order"][start : start + count]
        assert (token_slots[tokens] == slot).all()
        seen.extend(tokens.tolist())
    assert sorted(seen) == np.flatnonzero(token_slots < slots).tolist()


@given(assignments())
def test_groups_cover_each_slots_tokens_in_the_order_they_came(assignment):
    token_slots, slots, tile_size = assignment
    table, groups = tile_table(token_slots, slots, tile_size)
    found = {slot: table["order"][first:end].tolist() for slot, first, end in groups}
    assert found == {slot: np.flatnonzero(token_slots == slot).tolist() for slot in set(token_slots.tolist()) - {slots}}


@given(assignments())
def test_no_assignment_needs_more_tiles_than_the_sizes_allow(assignment):
    token_slots, slots, tile_size = assignment
    table, _ = tile_table(token_slots, slots, tile_size)
    assert len(table["tile_slots"]) <= most_tiles(len(token_slots), slots, tile_size)


def test_some_assignment_needs_all_the_tiles_the_sizes_allow():
    one_each_and_the_rest_for_the_last = int32([0, 1, 2, *[3] * 33])
    table, _ = tile_table(one_each_and_the_rest_for_the_last, 4, 16)
    assert len(table["tile_slots"]) == most_tiles(36, 4, 16) == 6


def test_unused_tiles_come_last_and_are_empty():
    table, _ = tile_table(int32([1, 1, 1]), slots=2, tile_size=2, tiles=5)
    assert table["tile_slots"][:2].tolist() == [1, 1]
    assert table["tile_counts"].tolist() == [2, 1, 0, 0, 0]


def test_a_step_with_fewer_tokens_than_its_frame_is_filled_up_with_base_tokens():
    frame = BatchFrame(tokens=8, slots=3, tile_size=4)
    line, groups = frame.pack(int32([2, 0, 2]))
    batch = frame.unpack(torch.from_numpy(line), groups)
    assert len(line) == frame.layout.numbers
    assert batch.token_slots.tolist() == [2, 0, 2, 3, 3, 3, 3, 3]
    assert batch.groups == ((0, 0, 1), (2, 1, 3))
    assert batch.order.tolist()[:3] == [1, 0, 2]
    assert batch.tile_counts.tolist() == [1, 2, 0, 0]


def test_a_batch_sees_what_is_written_later_in_the_same_place():
    frame = BatchFrame(tokens=3, slots=2, tile_size=16)
    line = np.zeros(frame.layout.numbers, np.int32)
    batch = frame.unpack(torch.from_numpy(line))
    line[:], _ = frame.pack(int32([1, 0, 1]))
    assert batch.tile_slots.tolist() == [0, 1]
    assert batch.order.tolist() == [1, 0, 2]


def test_a_batch_says_the_same_as_its_table():
    token_slots = int32([1, 2, 0, 1, 1])
    batch, (table, groups) = make_batch(token_slots, 2, CPU, tile_size=2), tile_table(token_slots, 2, 2, tiles=3)
    assert {name: getattr(batch, name).tolist() for name in table} == {name: table[name].tolist() for name in table}
    assert batch.groups == groups


def test_a_prompt_makes_large_tiles_and_decoding_small_ones():
    assert make_batch(int32([0] * 64), 1, CPU).tile_size == 16
    assert make_batch(int32([0] * 2048), 1, CPU).tile_size >= 64
