"""Launches of the kernels for a packed matrix: a product of few rows, and the matrix written out for many rows.

Launches depend on shapes only, so a CUDA graph can capture them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.programmatic_launch import programmatic
from rota.engine.quantised.few_rows_kernels import few_rows_kernel, write_out_kernel
from rota.engine.quantised.packing import TILE, Packed
from rota.engine.row_product import MOST_LOADED, SMALLEST_DOT

# More rows than this are multiplied in another way, by bits.
MOST_ROWS = {4: 256, 8: 64}
MOST_ROW_TILES = 4
# Loads that are on their way while a step is multiplied; rows of x take shared memory too.
STAGES = {16: 4, 32: 4, 64: 3, 128: 3}
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
        OPERAND=_operand(x.dtype), **programmatic(x), num_warps=tuning.warps, num_stages=STAGES[tile_rows],
    )  # fmt: skip
    return y


def ended_for(packed: Packed) -> Tensor:
    """A count for each tile that a product can have."""
    count = MOST_ROW_TILES * triton.cdiv(packed.outputs, TILE)
    return torch.zeros(count, dtype=torch.int32, device=packed.words.device)


def written_out(packed: Packed, dtype: torch.dtype, first: int, end: int) -> Tensor:
    """[end - first, inputs]: these outputs of a matrix in four bits; `first` is a multiple of TILE."""
    tiles = triton.cdiv(end - first, TILE)
    weight = torch.empty(tiles * TILE, packed.inputs, dtype=dtype, device=packed.words.device)
    write_out_kernel[(tiles, packed.steps)](
        packed.words, packed.marks, weight, packed.inputs, packed.padded, first, *packed.strides, STEP=packed.step,
        PER_GROUP=packed.per_group, num_warps=4,
    )  # fmt: skip
    return weight[: end - first]


def _operand(dtype: torch.dtype) -> tl.dtype:
    # The interpreter stores bfloat16 as integers and multiplies the integers; only float32 is right there.
    return tl.float32 if triton.knobs.runtime.interpret else _OPERANDS[dtype]
