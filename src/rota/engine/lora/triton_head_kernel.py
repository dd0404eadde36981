"""The head of an adapter's own on a GPU: the logits of its rows are overwritten, and all others are left alone."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["order", "tile_slots", "tile_starts", "tile_counts"])
def own_head_kernel(
    logits,  # -> [rows, OUTPUTS or more]
    x,  # -> [rows, INPUTS]
    matrices,  # -> [places, MATRIX]
    heads,  # -> [slots + 1] int32: the place of a slot's head, below 0 if it has the model's
    order,
    tile_slots,
    tile_starts,
    tile_counts,
    logits_stride,
    x_stride,
    MATRIX: tl.constexpr,  # numbers of a place
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    OPERAND: tl.constexpr,  # what tl.dot multiplies
):
    tile = tl.program_id(1)
    count = tl.load(tile_counts + tile)
    place = tl.load(heads + tl.load(tile_slots + tile))
    if count == 0 or place < 0:
        return
    nth = tl.arange(0, TILE)
    is_row = nth < count
    row = tl.load(order + tl.load(tile_starts + tile) + nth, mask=is_row, other=0).to(tl.int64)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < OUTPUTS
    column = tl.arange(0, STEP)
    x_at = x + row[:, None] * x_stride + column[None, :]
    # In 64 bits: a few matrices of a large vocabulary have more than 2³¹ numbers.
    own = matrices + place.to(tl.int64) * MATRIX
    own_at = own + output[:, None] * INPUTS + column[None, :]
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for _ in range(0, INPUTS, STEP):
        inside = (column < INPUTS)[None, :]
        x_tile = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0).to(OPERAND)
        own_tile = tl.load(own_at, mask=is_output[:, None] & inside, other=0.0).to(OPERAND)
        total = tl.dot(x_tile, tl.trans(own_tile), total, input_precision="ieee")
        column += STEP
        x_at += STEP
        own_at += STEP
    out = logits + row[:, None] * logits_stride + output[None, :]
    tl.store(out, total.to(logits.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
