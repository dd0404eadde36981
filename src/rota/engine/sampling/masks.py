"""Masks are bits, one a token, that say which tokens may come; a row without one may get any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 32
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Masks:
    """Worked out for one step, on the device: of each of its rows the line, and the lines."""

    lines: Tensor  # [n] int32, -1 for a row without a mask
    bits: Tensor  # [lines, words] int32, the lowest bit first


@dataclass(frozen=True, slots=True)
class Limits:
    """Written when rows are seated, on the device: of each row a mask for its first tokens, and one for the others."""

    rows: Tensor  # [n] int32, those of a step
    lengths: Tensor  # [n] int32, tokens that each of them knows
    # [rows, 2] float32: 1 if the row's second mask counts, and up to which length the first one does.
    scopes: Tensor
    bits: Tensor  # [rows, 2, words] int32


# Logits [n, vocabulary] in, new logits in float32 out: minus infinity for tokens that may not come.
MaskLogits = Callable[[Tensor, Masks | None, Limits | None], Tensor]


def words_of(vocabulary: int) -> int:
    """How many words of 32 bits hold a bit for every token."""
    return -(-vocabulary // BITS)


def packed(tokens: Iterable[int], vocabulary: int) -> Words:
    """[words] int32 with the bits of these tokens set; a token that the model does not have is passed over."""
    bits = np.zeros(words_of(vocabulary) * BITS, np.uint8)
    listed = np.fromiter(tokens, np.int64)
    bits[listed[listed < vocabulary]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_logits(logits: Tensor, masks: Masks | None, limits: Limits | None) -> Tensor:
    """As `MaskLogits` says."""
    is_allowed = torch.ones_like(logits, dtype=torch.bool)
    if masks is not None:
        lines = masks.lines.to(torch.int64)
        is_allowed &= _unpacked(masks.bits, logits.shape[1])[lines.clamp(min=0)] | (lines < 0)[:, None]
    if limits is not None:
        has_mask, until = limits.scopes[limits.rows].unbind(1)
        is_early = limits.lengths < until
        bits = limits.bits[limits.rows, torch.where(is_early, 0, 1)]
        is_allowed &= _unpacked(bits, logits.shape[1]) | ~(is_early | (has_mask > 0))[:, None]
    return logits.float().masked_fill(~is_allowed, -torch.inf)


def _unpacked(bits: Tensor, vocabulary: int) -> Tensor:
    """[n, words] int32 -> [n, vocabulary] bool. NumPy is ten times as fast as torch on a CPU."""
    if bits.device.type == "cpu":
        whole = np.unpackbits(bits.contiguous().numpy().view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(whole.view(np.bool_))
    places = torch.arange(BITS, dtype=torch.int32, device=bits.device)
    return (bits[:, :, None] >> places & 1).flatten(1)[:, :vocabulary].bool()
