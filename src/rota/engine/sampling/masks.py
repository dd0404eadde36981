"""Masks are bits, one a token, that say which tokens may come; a row without one may get any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """On the device: of each row of a step its line, and the lines."""

    lines: Tensor  # [n] int32, -1 for a row without a mask
    bits: Tensor  # [lines, words] int32, the lowest bit first


MaskLogits = Callable[[Tensor, Masks], Tensor]


def words_of(vocabulary: int) -> int:
    """How many words of 32 bits hold a bit for every token."""
    return -(-vocabulary // BITS)


def mask_logits(logits: Tensor, masks: Masks) -> Tensor:
    """[n, vocabulary] new logits: minus infinity for tokens that may not come."""
    places = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    allowed = (masks.bits[:, :, None] >> places & 1).flatten(1)[:, : logits.shape[1]].bool()
    lines = masks.lines.to(torch.int64)
    is_allowed = allowed[lines.clamp(min=0)] | (lines < 0)[:, None]
    return logits.masked_fill(~is_allowed, -torch.inf)
