"""The product of some ten to some hundred rows in eight-bit floats: the inputs are shared among programs.

    program (tile of outputs, share of inputs)    codes of W[tile, share] @ codes of x[:, share].T  ->  partial
    the last program of a tile to end             sum(partial) * scales of the outputs and rows     ->  y[:, tile]

Torch's scaled product cuts only the outputs. Of Llama-8B's matrices three have too few of them for all processors of an
H200: at 64 rows it takes 102 µs for a layer's four, and this one 73.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.quantised.codes import Scaled
from rota.engine.quantised.few_rows_kernels import add_shares, store_tile
from rota.engine.quantised.packing import Packed

MOST_ROWS = 256
SMALLEST_DOT = 16
# Sums of shares that a program loads together: 64 for each thread.
MOST_LOADED = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTuning:
    """Shapes of the product; `packed_product.py` tries them out."""

    columns: int  # outputs per program
    shares: int  # of the inputs
    step: int  # inputs per iteration
    stages: int  # of loads on their way
    warps: int


@triton.jit(do_not_specialize=["rows", "shares"])
def scaled_rows_kernel(
    x,  # -> [rows, inputs] float8_e4m3fn, in the order of words (`packing.py`), as the matrix
    x_scales,  # -> [rows] float32
    matrix,  # -> [outputs, inputs] float8_e4m3fn
    scales,  # -> [outputs] float32
    bias,  # -> [outputs], read only with HAS_BIAS
    y,  # -> [rows, outputs]
    partial,  # -> [tiles, shares, COLUMNS, ROWS] float32
    ended,  # -> [tiles] int32, zeros; zeros again afterwards
    rows,
    inputs,
    outputs,
    steps,
    shares,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr,  # shares that are loaded together
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    tile, share = tl.program_id(0), tl.program_id(1)
    row, input = tl.arange(0, ROWS), tl.arange(0, STEP)
    output = tile * COLUMNS + tl.arange(0, COLUMNS)
    # Outputs beyond the last are computed as that one, and not stored.
    stored, share_steps = tl.minimum(output, outputs - 1), tl.cdiv(steps, shares)
    first = share * share_steps
    x_at = x + row[:, None] * inputs + (first * STEP + input)[None, :]
    matrix_at = matrix + stored[:, None].to(tl.int64) * inputs + (first * STEP + input)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for _ in range(first, tl.minimum(first + share_steps, steps)):
        x_tile = tl.load(x_at, mask=(row < rows)[:, None], other=0.0).to(OPERAND)
        total = tl.dot(tl.load(matrix_at).to(OPERAND), tl.trans(x_tile), total)
        x_at, matrix_at = x_at + STEP, matrix_at + STEP
    if IS_SHARED:
        of_tile = partial + tile.to(tl.int64) * (shares * COLUMNS * ROWS)
        total, is_last = add_shares(of_tile, ended + tile, total, row < rows, share, shares, COLUMNS, ROWS, AT_ONCE)
    if not IS_SHARED or is_last:
        total *= tl.load(scales + stored)[:, None] * tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        store_tile(y, total, bias, row, output, rows, outputs, HAS_BIAS)


def divides(packed: Packed, step: int) -> bool:
    """Whether a matrix in eight bits is read in whole steps."""
    return packed.bits == 8 and packed.inputs % step == 0


def multiply_scaled(
    x: Scaled, packed: Packed, bias: Tensor | None, ended: Tensor, tuning: ScaledTuning, dtype: torch.dtype
) -> Tensor:
    """[rows, inputs] -> [rows, outputs] for at most MOST_ROWS rows; `ended` as `few_rows.multiply` takes it."""
    rows, tiles = len(x.codes), triton.cdiv(packed.outputs, tuning.columns)
    assert rows <= MOST_ROWS
    assert divides(packed, tuning.step)
    tile_rows = max(SMALLEST_DOT, triton.next_power_of_2(rows))
    y = torch.empty(rows, packed.outputs, dtype=dtype, device=x.codes.device)
    partial = x.scales
    if tuning.shares > 1:
        shape = (tiles, tuning.shares, tuning.columns, tile_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.codes.device)
    scaled_rows_kernel[(tiles, tuning.shares)](
        x.codes, x.scales, packed.words.view(torch.float8_e4m3fn), packed.marks, y if bias is None else bias, y,
        partial, ended, rows, packed.inputs, packed.outputs, packed.inputs // tuning.step, tuning.shares,
        STEP=tuning.step, COLUMNS=tuning.columns, ROWS=tile_rows, IS_SHARED=tuning.shares > 1,
        AT_ONCE=max(1, min(8, MOST_LOADED // (tuning.columns * tile_rows))), HAS_BIAS=bias is not None,
        # The interpreter multiplies the bits of eight-bit floats, not the numbers.
        OPERAND=tl.float32 if triton.knobs.runtime.interpret else tl.float8e4nv,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return y
