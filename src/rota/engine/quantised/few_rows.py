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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.programmatic_launch import follow, programmatic
from rota.engine.quantised.packing import TILE as OUTPUTS_IN_TILE
from rota.engine.quantised.packing import Packed
from rota.engine.row_product import MOST_LOADED, SMALLEST_DOT, add_shares, operand, store_tile

# ── unpacking ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Codes are unpacked two at a time, by the bits of the numbers: converting each integer takes more instructions.
#
#     four bits    0x4300 | code  is  128 + code  in bfloat16 (0x6400: 1024 + code in float16); subtracting is exact
#     eight bits   s eeee mmm, moved to where 16 bits have sign, exponent and mantissa, is the number times 2**-120
#                  (2**-8 in float16), and a product is exact
#
# A word of 32 bits holds pairs of codes, one code in each half (`packing.py`). What assembly makes of a pair is one
# register of two numbers, as tensor cores take them. The interpreter has no assembly, nor 16-bit floats that it can
# multiply: there the same codes become float32.

# Registers of 16 bits for the numbers, then the word; with four bits also a pair of zeros.
EIGHT_NUMBERS = tl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))
FOUR_NUMBERS = tl.constexpr(",".join(["=h"] * 4 + ["r"]))
# lop3's table of (a & b) | c.
AND_OR = "0xea"


def _four_bits(kind: str, magic: str, one: str) -> str:
    """$0 … $7: numbers; $8: the word; $9: what is added to a pair, minus the magic number and the zero."""
    lines = [".reg .b32 moved, pair, one;", f"mov.b32 one, {one};"]
    for nth in range(4):
        lines += [
            f"shr.u32 moved, $8, {4 * nth};",
            f"lop3.b32 pair, moved, 0x000f000f, {magic}, {AND_OR};",
            f"fma.rn.{kind}x2 pair, pair, one, $9;",
            f"mov.b32 {{${2 * nth}, ${2 * nth + 1}}}, pair;",
        ]
    return "{" + " ".join(lines) + "}"


def _eight_bits(kind: str, right: int, magnitude: str, factor: str) -> str:
    """$0 … $3: numbers; $4: the word, whose codes move `right` from the upper byte of a half."""
    places = (f"shl.b32 sign, $4, 8; shl.b32 moved, $4, {8 - right};", f"mov.b32 sign, $4; shr.u32 moved, $4, {right};")
    # A product is an addition too, of -0: then a zero keeps its sign.
    lines = [".reg .b32 sign, moved, pair, factor, none;", f"mov.b32 factor, {factor}; mov.b32 none, 0x80008000;"]
    for nth, place in enumerate(places):
        lines += [
            place,
            f"and.b32 moved, moved, {magnitude};",
            f"lop3.b32 pair, sign, 0x80008000, moved, {AND_OR};",
            f"fma.rn.{kind}x2 pair, pair, factor, none;",
            f"mov.b32 {{${2 * nth}, ${2 * nth + 1}}}, pair;",
        ]
    return "{" + " ".join(lines) + "}"


FOUR_BITS_BFLOAT16 = tl.constexpr(_four_bits("bf16", "0x43004300", "0x3f803f80"))
FOUR_BITS_FLOAT16 = tl.constexpr(_four_bits("f16", "0x64006400", "0x3c003c00"))
EIGHT_BITS_BFLOAT16 = tl.constexpr(_eight_bits("bf16", 4, "0x07f007f0", "0x7b807b80"))
EIGHT_BITS_FLOAT16 = tl.constexpr(_eight_bits("f16", 1, "0x3f803f80", "0x5c005c00"))
# -128 and -1024, twice, as one integer; what is added to their bits is added to the numbers.
MINUS_128 = tl.constexpr(0xC300C300 - 2**32)
MINUS_1024 = tl.constexpr(0xE400E400 - 2**32)
# From the exponents of eight bits to those of 32.
LARGER_EXPONENT = tl.constexpr(2.0**120)


@triton.jit
def unpack_four(words, zeros, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operand: tl.constexpr):
    """words [OUTPUTS, INPUTS / 8] and zeros [OUTPUTS, 1], int32 -> code - zero, [OUTPUTS, INPUTS]."""
    zeros = tl.broadcast_to(zeros, words.shape)
    if operand == tl.bfloat16:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            FOUR_BITS_BFLOAT16, EIGHT_NUMBERS, [words, zeros * 0x10001 + MINUS_128], (tl.bfloat16,) * 8, True, 1
        )
    elif operand == tl.float16:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            FOUR_BITS_FLOAT16, EIGHT_NUMBERS, [words, zeros * 0x10001 + MINUS_1024], (tl.float16,) * 8, True, 1
        )
    else:
        n0, n1, n2, n3 = _four_codes(words, 0)
        n4, n5, n6, n7 = _four_codes(words, 8)
        zeros = zeros.to(tl.float32)
        n0, n1, n2, n3 = n0 - zeros, n1 - zeros, n2 - zeros, n3 - zeros
        n4, n5, n6, n7 = n4 - zeros, n5 - zeros, n6 - zeros, n7 - zeros
    low, high = tl.join(tl.join(n0, n1), tl.join(n2, n3)), tl.join(tl.join(n4, n5), tl.join(n6, n7))
    numbers = tl.reshape(tl.join(low, high), [OUTPUTS, INPUTS // 32, 4, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 5, 4, 2, 3]), [OUTPUTS, INPUTS])


@triton.jit
def unpack_eight(words, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operand: tl.constexpr):
    """words [OUTPUTS, INPUTS / 4] int32 -> numbers, [OUTPUTS, INPUTS]."""
    if operand == tl.bfloat16:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            EIGHT_BITS_BFLOAT16, FOUR_NUMBERS, [words], (tl.bfloat16,) * 4, True, 1
        )
    elif operand == tl.float16:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            EIGHT_BITS_FLOAT16, FOUR_NUMBERS, [words], (tl.float16,) * 4, True, 1
        )
    else:
        n0, n1, n2, n3 = _number(words), _number(words >> 16), _number(words >> 8), _number(words >> 24)
    numbers = tl.reshape(tl.join(tl.join(n0, n1), tl.join(n2, n3)), [OUTPUTS, INPUTS // 16, 4, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 4, 2, 3]), [OUTPUTS, INPUTS])


@triton.jit
def _four_codes(words, first: tl.constexpr):
    """Two pairs of a word, as float32."""
    low, high = words >> first, words >> (first + 16)
    n0, n1, n2, n3 = low & 15, high & 15, (low >> 4) & 15, (high >> 4) & 15
    return n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)


@triton.jit
def _number(code):
    """The lowest eight bits as float32."""
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * LARGER_EXPONENT


# Outputs whose words lie together.
TILE = tl.constexpr(OUTPUTS_IN_TILE)


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
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    # Programs that begin one after the other read the same part of the matrix.
    row_tile, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, input = row_tile * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
    output = tile * COLUMNS + tl.arange(0, COLUMNS)
    stored, share_steps = tl.minimum(output, padded - 1), tl.cdiv(steps, shares)
    first = share * share_steps
    x_at = x + row[:, None].to(tl.int64) * x_stride + (first * STEP + input)[None, :]
    words_at = _words_at(words, stored, first, tile_stride, output_stride, step_stride, STEP * BITS // 32)
    follow(PROGRAMMATIC)
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


# ── launches ────────────────────────────────────────────────────────────────────────────────────────────────────────
# They depend on shapes only, so a CUDA graph can capture them.

# More rows than this are multiplied in another way, by bits.
MOST_ROWS = {4: 256, 8: 64}
MOST_ROW_TILES = 4
# Loads that are on their way while a step is multiplied; rows of x take shared memory too.
STAGES = {16: 4, 32: 4, 64: 3, 128: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTuning:
    """Shapes of the product; `packed_product.py` tries them out."""

    columns: int  # outputs per program
    shares: int  # of the inputs
    rows: int = 64  # most rows per program
    warps: int = 4


def multiply(x: Tensor, packed: Packed, bias: Tensor | None, ended: Tensor, tuning: ProductTuning) -> Tensor:
    """[rows, inputs] -> [rows, outputs] for at most MOST_ROWS rows.

    ended: int32 zeros, as `ended_for` makes them, of this matrix alone: no two products of a matrix run at one time.
    """
    rows, tiles = len(x), triton.cdiv(packed.outputs, tuning.columns)
    assert rows <= MOST_ROWS[packed.bits]
    assert x.stride(1) == 1
    tile_rows = min(tuning.rows, max(SMALLEST_DOT, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, tile_rows)
    y = torch.empty(rows, packed.outputs, dtype=x.dtype, device=x.device)
    partial = y
    if tuning.shares > 1:
        shape = (row_tiles, tiles, tuning.shares, tuning.columns, tile_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    few_rows_kernel[(row_tiles, tiles, tuning.shares)](
        x, packed.words, packed.marks, x if bias is None else bias, y, partial, ended, rows, packed.inputs,
        packed.outputs, packed.padded, packed.steps, tuning.shares, x.stride(0), *packed.strides,
        BITS=packed.bits, STEP=packed.step, PER_GROUP=packed.per_group, COLUMNS=tuning.columns, ROWS=tile_rows,
        IS_EVEN=packed.inputs % packed.step == 0, IS_SHARED=tuning.shares > 1,
        AT_ONCE=max(1, min(8, MOST_LOADED // (tuning.columns * tile_rows))), HAS_BIAS=bias is not None,
        OPERAND=operand(x.dtype), **programmatic(x), num_warps=tuning.warps, num_stages=STAGES[tile_rows],
    )  # fmt: skip
    return y


def ended_for(packed: Packed) -> Tensor:
    """A count for each tile that a product can have."""
    count = MOST_ROW_TILES * triton.cdiv(packed.outputs, OUTPUTS_IN_TILE)
    return torch.zeros(count, dtype=torch.int32, device=packed.words.device)


def written_out(packed: Packed, dtype: torch.dtype, first: int, end: int) -> Tensor:
    """[end - first, inputs]: these outputs of a matrix in four bits; `first` is a multiple of OUTPUTS_IN_TILE."""
    tiles = triton.cdiv(end - first, OUTPUTS_IN_TILE)
    weight = torch.empty(tiles * OUTPUTS_IN_TILE, packed.inputs, dtype=dtype, device=packed.words.device)
    write_out_kernel[(tiles, packed.steps)](
        packed.words, packed.marks, weight, packed.inputs, packed.padded, first, *packed.strides, STEP=packed.step,
        PER_GROUP=packed.per_group, num_warps=4,
    )  # fmt: skip
    return weight[: end - first]
