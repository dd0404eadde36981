"""The product of a few to some hundred rows by a matrix that is read once: its inputs are shared among programs.

    program (tile of outputs, share of inputs)    W[tile, share] @ x[:, share].T                 ->  partial
    the last program of a tile to end             sum(partial) * scales of the outputs and rows  ->  y[:, tile]

Libraries cut only the outputs, or add shares in a launch of their own. A matrix that has few outputs leaves processors
idle then. Numbers may be of 16 bits, or codes of eight bits with a scale for each output and each row. While the kernel
before this one ends, the first steps of the matrix are brought near (`programmatic_launch.py`).
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.programmatic_launch import LINE, follow, prefetch, programmatic

MOST_ROWS = 256
SMALLEST_DOT = 16
# Sums of shares that a program loads together: 64 for each thread.
MOST_LOADED = 8192
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTuning:
    """Shapes of the product, which are tried out."""

    columns: int  # outputs per program
    shares: int  # of the inputs
    step: int  # inputs per iteration
    stages: int  # of loads on their way
    warps: int
    ahead: int = 2  # steps of the matrix that are brought near before the rows are there


@triton.jit(do_not_specialize=["rows", "shares"])
def row_product_kernel(
    x,  # -> [rows, inputs]
    x_scales,  # -> [rows] float32; None: x are numbers, not codes, and the matrix too
    matrix,  # -> [outputs, inputs]
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
    x_stride,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    AT_ONCE: tl.constexpr,  # shares that are loaded together
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    AHEAD: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    tile, share = tl.program_id(0), tl.program_id(1)
    row, input = tl.arange(0, ROWS), tl.arange(0, STEP)
    output = tile * COLUMNS + tl.arange(0, COLUMNS)
    # Outputs beyond the last are computed as that one, and not stored.
    stored, share_steps = tl.minimum(output, outputs - 1), tl.cdiv(steps, shares)
    first = share * share_steps
    of_outputs = matrix + stored[:, None].to(tl.int64) * inputs
    if PROGRAMMATIC:
        PER_LINE: tl.constexpr = LINE * 8 // matrix.dtype.element_ty.primitive_bitwidth
        for nth in tl.static_range(AHEAD):
            near = tl.minimum(first + nth, steps - 1) * STEP
            prefetch(of_outputs + near + tl.arange(0, max(1, STEP // PER_LINE))[None, :] * PER_LINE)
    follow(PROGRAMMATIC)
    x_at = x + row[:, None] * x_stride + (first * STEP + input)[None, :]
    matrix_at = of_outputs + (first * STEP + input)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for _ in range(first, tl.minimum(first + share_steps, steps)):
        x_tile = tl.load(x_at, mask=(row < rows)[:, None], other=0.0).to(OPERAND)
        total = tl.dot(tl.load(matrix_at).to(OPERAND), tl.trans(x_tile), total, input_precision="ieee")
        x_at, matrix_at = x_at + STEP, matrix_at + STEP
    if IS_SHARED:
        of_tile = partial + tile.to(tl.int64) * (shares * COLUMNS * ROWS)
        total, is_last = add_shares(of_tile, ended + tile, total, row < rows, share, shares, COLUMNS, ROWS, AT_ONCE)
    if not IS_SHARED or is_last:
        if x_scales is not None:
            total *= tl.load(scales + stored)[:, None] * tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
        store_tile(y, total, bias, row, output, rows, outputs, HAS_BIAS)


@triton.jit
def add_shares(
    partial, ended, total, is_row, share, shares, COLUMNS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Puts a share down; if it is the last one, the sum of all shares, and True."""
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(partial + share * (COLUMNS * ROWS) + place, total, mask=is_row[None, :])
    tl.debug_barrier()  # all threads have stored before one counts
    is_last = tl.atomic_add(ended, 1, sem="acq_rel") == shares - 1
    if is_last:
        # Some loads at a time: one by one they would wait for each other, and all of them take too many registers.
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for first in range(0, shares, AT_ONCE):
            for nth in tl.static_range(AT_ONCE):
                is_there = is_row[None, :] & (first + nth < shares)
                at = partial + (first + nth) * (COLUMNS * ROWS) + place
                total += tl.load(at, mask=is_there, other=0.0, cache_modifier=".cg")
        tl.store(ended, 0)
    return total, is_last


@triton.jit
def store_tile(y, total, bias, row, output, rows, outputs, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    at = y + row[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(at, total.to(y.dtype.element_ty), mask=(row < rows)[None, :] & (output < outputs)[:, None])


def multiply_rows(
    x: Tensor,
    matrix: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    ended: Tensor,
    tuning: RowTuning,
    dtype: torch.dtype,
) -> Tensor:
    """[rows, inputs] -> [rows, outputs] for at most MOST_ROWS rows; scales: of the rows and of the outputs.

    ended: int32 zeros, one for each tile of outputs at least, of this matrix alone: no two products of it run at one
    time. Launches depend on shapes only, so a CUDA graph can capture them.
    """
    (rows, inputs), outputs = x.shape, len(matrix)
    assert rows <= MOST_ROWS
    assert inputs % tuning.step == 0
    assert x.stride(1) == 1
    assert matrix.is_contiguous()
    tiles, tile_rows = triton.cdiv(outputs, tuning.columns), max(SMALLEST_DOT, triton.next_power_of_2(rows))
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    partial = y
    if tuning.shares > 1:
        shape = (tiles, tuning.shares, tuning.columns, tile_rows)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    row_scales, output_scales = scales or (None, None)
    row_product_kernel[(tiles, tuning.shares)](
        x, row_scales, matrix, output_scales, y if bias is None else bias, y, partial, ended, rows, inputs, outputs,
        inputs // tuning.step, tuning.shares, x.stride(0), STEP=tuning.step, COLUMNS=tuning.columns, ROWS=tile_rows,
        IS_SHARED=tuning.shares > 1, AT_ONCE=max(1, min(8, MOST_LOADED // (tuning.columns * tile_rows))),
        HAS_BIAS=bias is not None, OPERAND=operand(matrix.dtype), AHEAD=tuning.ahead, **programmatic(x),
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    return y


def operand(dtype: torch.dtype) -> tl.dtype:
    # The interpreter multiplies the bits of small floats, not the numbers.
    return tl.float32 if triton.knobs.runtime.interpret else _OPERANDS[dtype]
