"""Masks as one Triton launch; the twin of `masks.mask_logits`."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.sampling.masks import Masks

LARGEST_TILE = 4096


def mask_logits(logits: Tensor, masks: Masks) -> Tensor:
    """As `masks.mask_logits`."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == masks.bits.stride(1) == 1
    masked = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tile = min(LARGEST_TILE, triton.next_power_of_2(vocabulary))
    _mask_kernel[(count, triton.cdiv(vocabulary, tile))](
        logits, masks.lines, masks.bits, masked, vocabulary, logits.stride(0), masks.bits.stride(0), TILE=tile,
    )  # fmt: skip
    return masked


# Lines and bits lie in one buffer, where the number of rows decides about their alignment.
@triton.jit(do_not_specialize_on_alignment=["lines", "bits"])
def _mask_kernel(
    logits,  # -> [count, vocabulary] float32
    lines,  # -> [count] int32
    bits,  # -> [lines, words] int32
    masked,  # -> [count, vocabulary] float32, written
    vocabulary,
    logits_stride,
    bits_stride,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = offsets < vocabulary
    values = tl.load(logits + place * logits_stride + offsets, mask=is_inside)
    line = tl.load(lines + place).to(tl.int64)
    if line >= 0:
        words = tl.load(bits + line * bits_stride + offsets // 32, mask=is_inside, other=0)
        values = tl.where((words >> (offsets % 32)) & 1 != 0, values, float("-inf"))
    tl.store(masked + place * vocabulary + offsets, values, mask=is_inside)
