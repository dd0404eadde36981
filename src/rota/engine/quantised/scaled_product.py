"""The product of many rows in eight-bit floats on a GPU: one launch rounds x, torch's scaled product multiplies.

It needs tensor cores that take eight-bit floats: an Ada (8.9) or a Hopper (9.0) and newer.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.programmatic_launch import follow, programmatic
from rota.engine.quantised.codes import LARGEST, SMALLEST, Scaled, carried
from rota.engine.quantised.packing import Packed

# Sums in the tensor cores keep some 14 bits, where codes have four.
IS_QUICK_SUM = True


@triton.jit
def in_words(numbers, COLUMNS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr):
    """A row's numbers before they become codes, in the order of words (`packing.py`), and the row's scale."""
    largest = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST)
    # Zero times an infinity or NaN is NaN; a maximum may overlook a NaN, and eight bits have no infinity.
    scale = tl.div_rn(largest, MOST) + tl.sum(numbers * 0.0, 0)
    parts = tl.reshape(numbers * tl.div_rn(tl.full([], MOST, tl.float32), largest), [COLUMNS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(parts, [0, 2, 3, 1]), [COLUMNS]), scale


@triton.jit
def round_rows_kernel(
    x,  # -> [rows, WIDTH]
    codes,  # -> [rows, WIDTH] float8_e4m3fn, the inputs in the order of words (`packing.py`)
    scales,  # -> [rows] float32
    x_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    follow(PROGRAMMATIC)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    numbers = tl.load(x + row * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    ordered, scale = in_words(numbers, COLUMNS, MOST, LEAST)
    tl.store(codes + row * WIDTH + column, ordered.to(codes.dtype.element_ty), mask=column < WIDTH)
    tl.store(scales + row, scale)


def round_rows(x: Tensor) -> Scaled:
    """[rows, inputs] in eight-bit floats, each row with its scale; the inputs in the order of words."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert width % 16 == 0
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(width)
    round_rows_kernel[(rows,)](
        x, codes, scales, x.stride(0), WIDTH=width, COLUMNS=columns, MOST=LARGEST, LEAST=SMALLEST,
        **programmatic(x), num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    return Scaled(codes, scales)


class ScaledProduct:
    """x Wᵀ + b; rows that are rounded already are taken as they are."""

    def __init__(self, packed: Packed) -> None:
        self._codes = packed.words.view(torch.float8_e4m3fn).view(packed.outputs, packed.inputs).t()
        self._scales = packed.marks[None, :]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply(carried(x) or round_rows(x), bias, x.dtype)

    def multiply(self, rounded: Scaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The scaled product writes bfloat16 alone, whatever the model's precision is."""
        is_added_there = bias is not None and bias.dtype is torch.bfloat16
        y: Tensor = torch._scaled_mm(
            rounded.codes, self._codes, scale_a=rounded.scales[:, None], scale_b=self._scales,
            bias=bias if is_added_there else None, out_dtype=torch.bfloat16, use_fast_accum=IS_QUICK_SUM,
        )  # fmt: skip
        y = y.to(dtype)
        return y if bias is None or is_added_there else y.add_(bias)
