"""Biases as one Triton launch, a program per row; the twin of `biases.add_biases`."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rota.engine.sampling.biases import Biases


def add_biases(logits: Tensor, rows: Tensor, biases: Biases) -> None:
    """As `biases.add_biases`."""
    most = biases.tokens.shape[1]
    assert logits.stride(1) == 1
    _add_kernel[(len(logits),)](
        logits, rows, biases.counts, biases.tokens, biases.values,
        logits.stride(0), biases.counts.stride(0), most, TILE=triton.next_power_of_2(most),
    )  # fmt: skip


# A step's inputs may lie anywhere in a larger buffer, and so may counts.
@triton.jit(do_not_specialize_on_alignment=["rows", "counts"])
def _add_kernel(
    logits,  # -> [count, vocabulary] float32, changed
    rows,  # -> [count] int32
    counts,  # -> [rows] float32
    tokens,  # -> [rows, most] int64
    values,  # -> [rows, most] float32
    logits_stride,
    counts_stride,
    most,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    offsets = tl.arange(0, TILE)
    is_own = offsets < tl.load(counts + row * counts_stride)
    token = tl.load(tokens + row * most + offsets, mask=is_own, other=0)
    value = tl.load(values + row * most + offsets, mask=is_own, other=0.0)
    target = logits + place * logits_stride + token
    tl.store(target, tl.load(target, mask=is_own) + value, mask=is_own)
