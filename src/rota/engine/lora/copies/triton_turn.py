"""A kernel that turns B on the way to its place: what is stored side by side by rank lies side by side by output then.

Torch's own copy of a turned tensor reads 32 bytes for each number of an adapter of rank 16. It took 0.7 ms for 42 MB,
beside which a decode step took 1.13 times as long (H200, 2026-11-17).
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Numbers of a program's tile; few kernels for many ranks.
TILE, FEWEST_RANKS = 4096, 16


def turn(stored: Tensor, first: int, target: Tensor, scale: float) -> None:
    """stored: [layers, outputs, rank]; target: [layers, some of the ranks, outputs], those from `first` on."""
    layers, outputs, rank = stored.shape
    ranks = max(FEWEST_RANKS, triton.next_power_of_2(target.shape[1]))
    block = max(1, TILE // ranks)
    turn_kernel[(triton.cdiv(outputs, block), layers)](
        stored, target, outputs, rank, first, target.shape[1], target.stride(0), scale, RANKS=ranks, BLOCK=block
    )


@triton.jit
def turn_kernel(
    stored, target, outputs, rank, first, count, layer_stride, scale, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    # A bank of many slots has more than 2**31 numbers.
    layer = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, RANKS)
    is_real = (output < outputs)[:, None] & (number < count)[None, :]
    place = stored + layer * outputs * rank + output[:, None] * rank + first + number[None, :]
    values = tl.load(place, mask=is_real, other=0.0).to(tl.float32) * scale
    turned = tl.trans(values.to(target.dtype.element_ty))
    to = target + layer * layer_stride + number[:, None] * outputs + output[None, :]
    tl.store(to, turned, mask=(number < count)[:, None] & (output < outputs)[None, :])
