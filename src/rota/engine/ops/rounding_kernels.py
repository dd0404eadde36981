"""Norm and silu that also write their rows in eight bits: twins of `fused_kernels.py`, a program for each token."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.chain import follow
from rota.engine.quantised.scaled_product import in_words


@triton.jit
def rounding_rms_norm_kernel(
    x,  # -> [tokens, WIDTH]
    residual,  # -> [tokens, WIDTH]; with ADD becomes x + residual
    weight,  # -> [WIDTH]
    output,  # -> [tokens, WIDTH], may be x
    codes,  # -> [tokens, WIDTH] float8_e4m3fn, in the order of words (`quantised/packing.py`)
    scales,  # -> [tokens] float32
    epsilon,
    x_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_real = columns < WIDTH
    scale = tl.load(weight + columns, mask=is_real, other=0.0)  # no forerunner writes it
    follow(CHAINED)
    row = tl.load(x + token * x_stride + columns, mask=is_real, other=0.0).to(tl.float32)
    if ADD:
        pointers = residual + token * WIDTH + columns
        row += tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
        # The norm sees the sum as later layers will see it: rounded.
        rounded = row.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=is_real)
        row = rounded.to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    normed *= scale.to(tl.float32)
    store_both(normed, output, codes, scales, token, is_real, WIDTH, COLUMNS, MOST, LEAST)


@triton.jit
def rounding_silu_multiply_kernel(
    gate_up,  # -> [tokens, 2 * WIDTH]
    output,  # -> [tokens, WIDTH]
    codes,
    scales,
    gate_up_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_real = columns < WIDTH
    pointers = gate_up + token * gate_up_stride + columns
    gate = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(pointers + WIDTH, mask=is_real, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    store_both(product, output, codes, scales, token, is_real, WIDTH, COLUMNS, MOST, LEAST)


@triton.jit
def store_both(
    numbers, output, codes, scales, token, is_real,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A row in 16 bits, and the codes of what was written."""
    kept = numbers.to(output.dtype.element_ty)
    columns = tl.arange(0, COLUMNS)
    tl.store(output + token * WIDTH + columns, kept, mask=is_real)
    ordered, scale = in_words(kept.to(tl.float32), COLUMNS, MOST, LEAST)
    tl.store(codes + token * WIDTH + columns, ordered.to(codes.dtype.element_ty), mask=is_real)
    tl.store(scales + token, scale)
