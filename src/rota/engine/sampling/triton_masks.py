"""Masks as one Triton launch; the twin of `masks.mask_logits`."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.sampling.masks import Limits, Masks

LARGEST_TILE = 4096


def mask_logits(logits: Tensor, masks: Masks | None, limits: Limits | None) -> Tensor:
    """As `masks.mask_logits`."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    masked = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    tile = min(LARGEST_TILE, triton.next_power_of_2(vocabulary))
    # What a step does not have is not read; any tensor stands in for it.
    lines, bits = (masks.lines, masks.bits) if masks is not None else (masked, masked)
    rows, lengths, scopes, limit_bits = (
        (limits.rows, limits.lengths, limits.scopes, limits.bits) if limits is not None else (masked,) * 4
    )
    _mask_kernel[(count, triton.cdiv(vocabulary, tile))](
        logits, masked, lines, bits, rows, lengths, scopes, limit_bits,
        vocabulary, logits.stride(0), triton.cdiv(vocabulary, 32), scopes.stride(0),
        MASKS=masks is not None, LIMITS=limits is not None, TILE=tile,
    )  # fmt: skip
    return masked


# Lines and bits lie in one buffer, where the number of rows decides about their alignment; so do a step's inputs.
@triton.jit(do_not_specialize_on_alignment=["lines", "bits", "rows", "lengths", "scopes"])
def _mask_kernel(
    logits,  # -> [count, vocabulary]
    masked,  # -> [count, vocabulary] float32, written
    lines,  # -> [count] int32
    bits,  # -> [lines, words] int32
    rows,  # -> [count] int32
    lengths,  # -> [count] int32
    scopes,  # -> [rows, 2] float32
    limit_bits,  # -> [rows, 2, words] int32
    vocabulary,
    logits_stride,
    words,
    scopes_stride,
    MASKS: tl.constexpr,
    LIMITS: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = offsets < vocabulary
    values = tl.load(logits + place * logits_stride + offsets, mask=is_inside).to(tl.float32)
    if MASKS:
        line = tl.load(lines + place).to(tl.int64)
        if line >= 0:
            values = _masked(values, bits + line * words, offsets, is_inside)
    if LIMITS:
        row = tl.load(rows + place).to(tl.int64)
        has_mask = tl.load(scopes + row * scopes_stride)
        until = tl.load(scopes + row * scopes_stride + 1)
        is_early = tl.load(lengths + place) < until
        if is_early:
            values = _masked(values, limit_bits + row * 2 * words, offsets, is_inside)
        elif has_mask > 0.0:
            values = _masked(values, limit_bits + (row * 2 + 1) * words, offsets, is_inside)
    tl.store(masked + place * vocabulary + offsets, values, mask=is_inside)


@triton.jit
def _masked(values, line, offsets, is_inside):
    """Values of the tokens whose bit is set, and minus infinity."""
    words = tl.load(line + offsets // 32, mask=is_inside, other=0)
    return tl.where((words >> (offsets % 32)) & 1 != 0, values, float("-inf"))
