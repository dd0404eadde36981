"""Rows remember: a plan brings what is new, and the device step holds what the forward pass needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rota.core.ids import BASE, BlockId, RequestId, Row
from rota.core.plan import Chunk, Grant, Seat, StepPlan
from rota.core.request import SamplingParams
from rota.engine.step.device_step import DeviceStep
from rota.engine.step.frames import StepFrame, frame_of, layout_of
from rota.engine.step.inputs import HostInputs, Rows

BLOCK_SIZE, SCRATCH, ROWS = 8, 99, 6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODES = StepFrame(4, page_changes=4)


def rows() -> Rows:
    return Rows(ROWS, pages=10, block_size=BLOCK_SIZE, scratch_block=SCRATCH, device=DEVICE)


def seat(row: int, tokens: int, *blocks: int, first_token: int = 100) -> Seat:
    known = tuple(range(first_token, first_token + tokens))
    held = tuple(BlockId(block) for block in blocks)
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=BASE,
        tokens=known,
        prompt_length=tokens,
        blocks=held,
        sampling=SamplingParams(),
    )


def chunk(row: int, start: int, length: int, samples: bool = False) -> Chunk:
    return Chunk(row=Row(row), start=start, length=length, samples=samples)


def plan(*seats: Seat, chunks: tuple[Chunk, ...] = (), decodes: tuple[int, ...] = (), **grants: int) -> StepPlan:
    """`row_3=7` grants block 7 to row 3."""
    granted = tuple(Grant(Row(int(name.removeprefix("row_"))), BlockId(block)) for name, block in grants.items())
    return StepPlan(step_id=1, seats=seats, grants=granted, chunks=chunks, decodes=tuple(Row(row) for row in decodes))


def accept(state: Rows, step: StepPlan, frame: StepFrame | None = None) -> HostInputs:
    return state.accept(step, frame or frame_of(step))


def unpacked(host: HostInputs) -> dict[str, Tensor]:
    return layout_of(host.frame).unpack(torch.from_numpy(host.numbers).to(DEVICE))


def step_of(state: Rows, step: StepPlan, frame: StepFrame | None = None) -> DeviceStep:
    """What the forward pass of a plan gets."""
    host = accept(state, step, frame)
    return state.device_step(unpacked(host), host.chunks)


def test_a_chunk_reads_its_tokens_from_its_seat_and_writes_where_its_blocks_say():
    state = rows()
    step = step_of(state, plan(seat(2, 20, 7, 3, 5), chunks=(chunk(2, 5, 6),)))
    assert step.token_ids.tolist() == [105, 106, 107, 108, 109, 110]
    assert step.positions.tolist() == [5, 6, 7, 8, 9, 10]
    assert step.addresses.tolist() == [7 * 8 + 5, 7 * 8 + 6, 7 * 8 + 7, 3 * 8, 3 * 8 + 1, 3 * 8 + 2]
    assert step.token_ids.dtype == step.positions.dtype == step.addresses.dtype == torch.int64
    assert step.decodes == 0


def test_several_chunks_lie_behind_each_other():
    state = rows()
    step = step_of(state, plan(seat(4, 9, 1, 2), seat(0, 3, 6), chunks=(chunk(4, 0, 9), chunk(0, 1, 2))))
    part = step.prefill
    assert part is not None
    assert part.rows.tolist() == [4, 0]
    assert part.starts.tolist() == [0, 1]
    assert part.offsets.tolist() == [0, 9, 11]
    assert (part.longest, part.host_rows, part.host_starts, part.host_lengths) == (9, (4, 0), (0, 1), (9, 2))
    assert step.positions.tolist() == [*range(9), 1, 2]
    assert step.addresses[-2:].tolist() == [6 * 8 + 1, 6 * 8 + 2]


def test_a_decode_computes_the_newest_token_behind_everything_computed_so_far():
    state = rows()
    accept(state, plan(seat(3, 9, 4, 5), chunks=(chunk(3, 0, 9, samples=True),)))
    state.newest_token[3] = 42
    for length in (10, 11, 12):
        step = step_of(state, plan(decodes=(3,)))
        assert step.token_ids.tolist() == [42]
        assert step.positions.tolist() == [length - 1]
        assert step.decode_lengths.tolist() == [length]
        assert step.addresses.tolist() == [5 * 8 + length - 1 - 8]


def test_a_grant_adds_one_block_to_the_row_s_table():
    state = rows()
    accept(state, plan(seat(1, 8, 4), chunks=(chunk(1, 0, 8, samples=True),)))
    step = step_of(state, plan(decodes=(1,), row_1=8))
    assert step.addresses.tolist() == [8 * 8]
    assert step.tables[1, :3].tolist() == [4, 8, SCRATCH]


def test_who_sits_down_takes_the_row_over():
    state = rows()
    accept(state, plan(seat(1, 16, 4, 5), chunks=(chunk(1, 0, 16, samples=True),)))
    accept(state, plan(decodes=(1,), row_1=6))
    accept(state, plan(seat(1, 7, 9, first_token=200), chunks=(chunk(1, 0, 7, samples=True),)))
    step = step_of(state, plan(decodes=(1,)))
    assert step.positions.tolist() == [7]
    assert step.addresses.tolist() == [9 * 8 + 7]
    step = step_of(state, plan(decodes=(1,), row_1=2))
    assert step.addresses.tolist() == [2 * 8]


def test_decodes_come_first_then_the_chunks_that_sample():
    state = rows()
    accept(state, plan(seat(5, 8, 1, 2), seat(0, 4, 3), chunks=(chunk(5, 0, 8, True), chunk(0, 0, 4, True))))
    state.newest_token[torch.tensor([5, 0], device=DEVICE)] = torch.tensor([55, 10], device=DEVICE)
    newcomers = (seat(1, 6, 7), seat(2, 3, 8), seat(3, 2, 9))
    chunks = (chunk(1, 0, 5), chunk(2, 0, 3, samples=True), chunk(3, 1, 1, samples=True))
    both = plan(*newcomers, chunks=chunks, decodes=(5, 0))
    host = accept(state, both)
    sections = unpacked(host)
    step = state.device_step(sections, host.chunks)
    assert both.sampled_rows == (5, 0, 2, 3)
    assert sections["rows"].tolist() == [5, 0]
    assert sections["sampled_rows"].tolist() == [2, 3]
    assert sections["lengths"].tolist() == [9, 5]
    assert sections["sampled_lengths"].tolist() == [3, 2]
    assert host.token_rows.tolist() == [5, 0, 1, 1, 1, 1, 1, 2, 2, 2, 3]
    assert step.decode_rows.tolist() == [5, 0]
    assert step.decode_lengths.tolist() == [9, 5]
    assert step.token_ids.tolist() == [55, 10, 100, 101, 102, 103, 104, 100, 101, 102, 101]
    assert step.positions.tolist() == [8, 4, 0, 1, 2, 3, 4, 0, 1, 2, 1]
    assert sections["last"].tolist() == [9, 10]


def test_a_graph_s_inputs_are_padded_with_what_touches_only_the_scratch_block():
    state = rows()
    accept(
        state, plan(seat(2, 8, 1), seat(4, 3, 5), chunks=(chunk(2, 0, 8, samples=True), chunk(4, 0, 3, samples=True)))
    )
    host = accept(state, plan(decodes=(4, 2), row_2=7), DECODES)
    sections = unpacked(host)
    assert sections["rows"].tolist() == host.token_rows.tolist() == [4, 2, ROWS, ROWS]
    assert sections["lengths"].tolist() == [4, 9, 1, 1]
    step = state.device_step(sections)
    assert step.addresses.tolist() == [5 * 8 + 3, 7 * 8, SCRATCH * 8, SCRATCH * 8]
    assert step.tables[2, :3].tolist() == [1, 7, SCRATCH]
    assert step.tables[ROWS].unique().tolist() == [SCRATCH]


def test_steps_with_and_without_a_graph_may_follow_each_other():
    state = rows()
    accept(state, plan(seat(2, 7, 1), chunks=(chunk(2, 0, 7, samples=True),)))
    assert step_of(state, plan(decodes=(2,)), DECODES).decode_lengths.tolist() == [8, 1, 1, 1]
    assert step_of(state, plan(decodes=(2,), row_2=3)).decode_lengths.tolist() == [9]
    assert step_of(state, plan(decodes=(2,)), DECODES).decode_lengths.tolist() == [10, 1, 1, 1]


def test_a_plan_may_only_seat():
    state = rows()
    host = accept(state, plan(seat(0, 8, 3)))
    assert host.frame == StepFrame(0)
    assert len(host.numbers) == 0
    assert state.tables[0, :2].tolist() == [3, SCRATCH]


def test_a_sequence_that_was_computed_in_another_row_decodes_its_last_token_at_once():
    state = rows()
    accept(state, plan(seat(3, 9, 4, 5), chunks=(chunk(3, 0, 9, samples=True),)))
    state.newest_token[3] = 42
    moved = replace(seat(1, 12, 7, 8), computed=11)
    for frame in (None, DECODES):
        step = step_of(state, plan(moved, decodes=(3, 1)), frame)
        assert step.token_ids[:2].tolist() == [42, 111]
        assert step.decode_lengths[1].item() == 12
        assert step.addresses[1].item() == 8 * 8 + 3
    assert step_of(state, plan(decodes=(1,))).decode_lengths.tolist() == [13]


def test_a_step_in_which_a_sequence_sits_down_to_decode_has_room_in_a_frame_of_decodes():
    long = replace(seat(1, 70, 1, 2, 3, 4, 5, 6, 7, 8, 9), computed=69)
    assert DECODES.holds(plan(long, decodes=(1,)))
    state = rows()
    step = step_of(state, plan(long, decodes=(1,)), DECODES)
    assert state.tables[1, :9].tolist() == list(range(1, 10))
    assert step.addresses[0].item() == 9 * 8 + 5
