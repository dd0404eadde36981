"""Two kernels read a matrix in few bits: one multiplies few rows by it, one writes it out for many rows.

    program (rows, tile of outputs, share of inputs)  W[tile, share] @ x[rows, share].T  ->  partial[rows, tile, share]
    the last program of a tile to end                 sum(partial[rows, tile])           ->  y[rows, tile]

Few rows make little work, and shares spread it over all processors. A count of the programs that have ended says which
one is the last. It adds the shares in their order: one launch, no zeroing, the same sum every time.

Weights are the left operand: a Hopper tensor core takes its left operand from registers, and there codes are unpacked.
A group's scale multiplies the sums of the group, not its weights. So no weight is rounded.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.chain import follow
from rota.engine.quantised.unpacking import unpack_eight, unpack_four
from rota.engine.row_product import add_shares, store_tile

# Outputs whose words lie together (`packing.py`).
TILE = tl.constexpr(64)


@triton.jit
def _words_at(words, output, step, tile_stride, output_stride, step_stride, WIDTH: tl.constexpr):
    """Pointers to the words of some outputs in one step, [outputs, WIDTH]."""
    # A large matrix has more than 2**31 bytes, so offsets need 64 bits.
    first = (output // TILE).to(tl.int64) * tile_stride + output % TILE * output_stride
    return words + (first + step * step_stride)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _split(mark):
    """A group's scale and zero, which share a word: 24 bits and 8 bits."""
    return (mark & -256).to(tl.float32, bitcast=True), mark & 255


@triton.jit(do_not_specialize=["rows", "shares"])
def few_rows_kernel(
    x,  # -> [rows, inputs]
    words,  # -> int32, in the order that the strides say
    marks,  # -> four bits: [groups, padded outputs] int32; eight bits: [outputs] float32 scales
    bias,  # -> [outputs], read only with HAS_BIAS
    y,  # -> [rows, outputs]
    partial,  # -> [tiles of rows, tiles, shares, COLUMNS, ROWS] float32
    ended,  # -> [tiles of rows, tiles] int32, zeros; zeros again afterwards
    rows, inputs, outputs,
    padded,  # outputs that `words` and `marks` have
    steps, shares,
    x_stride, tile_stride, output_stride, step_stride,
    BITS: tl.constexpr,
    STEP: tl.constexpr,  # inputs per iteration
    PER_GROUP: tl.constexpr,  # steps in a group
    COLUMNS: tl.constexpr,  # outputs per program
    ROWS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # whether steps end where the inputs end
    IS_SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr,  # shares that are loaded together
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    # Programs that begin one after the other read the same part of the matrix.
    row_tile, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, input = row_tile * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    output = tile * COLUMNS + tl.arange(0, COLUMNS)
    stored, share_steps = tl.minimum(output, padded - 1), tl.cdiv(steps, shares)
    first = share * share_steps
    x_at = x + row[:, None].to(tl.int64) * x_stride + (first * STEP + input)[None, :]
    words_at = _words_at(words, stored, first, tile_stride, output_stride, step_stride, STEP * BITS // 32)
    follow(CHAINED)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(first, tl.minimum(first + share_steps, steps)):
        is_real = (row < rows)[:, None]
        if not IS_EVEN:
            is_real = is_real & (step * STEP + input < inputs)[None, :]
        x_tile = tl.load(x_at, mask=is_real, other=0.0).to(OPERAND)
        if BITS == 4:
            scale, zero = _split(tl.load(marks + (step // PER_GROUP) * padded + stored))
            numbers = unpack_four(tl.load(words_at), zero[:, None], COLUMNS, STEP, OPERAND)
            total += tl.dot(numbers, tl.trans(x_tile), input_precision="ieee") * scale[:, None]
        else:
            is_word = None if IS_EVEN else (step * STEP + tl.arange(0, STEP // 4) * 4 < inputs)[None, :]
            numbers = unpack_eight(tl.load(words_at, mask=is_word), COLUMNS, STEP, OPERAND)
            total = tl.dot(numbers, tl.trans(x_tile), total, input_precision="ieee")
        x_at, words_at = x_at + STEP, words_at + step_stride
    if BITS == 8:
        total *= tl.load(marks + stored)[:, None]
    if IS_SHARED:
        nth = row_tile * tl.num_programs(1) + tile
        of_tile = partial + nth.to(tl.int64) * (shares * COLUMNS * ROWS)
        total, is_last = add_shares(of_tile, ended + nth, total, row < rows, share, shares, COLUMNS, ROWS, AT_ONCE)
    if not IS_SHARED or is_last:
        store_tile(y, total, bias, row, output, rows, outputs, HAS_BIAS)


@triton.jit
def write_out_kernel(
    words,
    marks,  # -> [groups, padded outputs] int32
    weight,  # -> [padded outputs - first, inputs]
    inputs,
    padded,
    first,  # output
    tile_stride,
    output_stride,
    step_stride,
    STEP: tl.constexpr,
    PER_GROUP: tl.constexpr,
):
    """A tile of outputs and a step of inputs in four bits becomes numbers of the weight's precision."""
    step = tl.program_id(1)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    stored = first + output
    scale, zero = _split(tl.load(marks + (step // PER_GROUP) * padded + stored))
    tile_words = tl.load(_words_at(words, stored, step, tile_stride, output_stride, step_stride, STEP // 8))
    numbers = unpack_four(tile_words, zero[:, None], TILE, STEP, tl.float32) * scale[:, None]
    input = step * STEP + tl.arange(0, STEP)
    at = weight + output[:, None].to(tl.int64) * inputs + input[None, :]
    tl.store(at, numbers.to(weight.dtype.element_ty), mask=(input < inputs)[None, :])
