"""A layer's cache holds keys and values by block: as the model computes them, or in eight bits with their scales.

A vector of one token and one head is rounded by itself, so nothing has to be known before it is written:

    scale = largest absolute value / 448          codes = vector / scale, in float8_e4m3fn
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EIGHT_BITS = torch.float8_e4m3fn
LARGEST_CODE = torch.finfo(EIGHT_BITS).max  # 448
# A smaller scale would be rounded away itself, and zero must not divide.
SMALLEST_SCALE = 1e-30


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer; there are scales if keys and values are in eight bits."""

    keys: Tensor  # [blocks, kv_heads, block_size, head_dim]
    values: Tensor
    scales: Tensor | None = None  # [blocks, kv_heads, block_size, 2] float32: of a key, then of its value


def in_eight_bits(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [.., head_dim] and float32 scales [..] of vectors; one that is not finite reads as not a number."""
    numbers = vectors.float()
    largest = numbers.abs().amax(-1)
    scales = (largest / LARGEST_CODE).clamp_(min=SMALLEST_SCALE).masked_fill_(largest == 0.0, 1.0)
    return (numbers / scales[..., None]).to(EIGHT_BITS), scales


def from_eight_bits(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors of these codes, rounded to `dtype`."""
    return codes.float().mul_(scales[..., None]).to(dtype)


def in_eight_bits_together(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of keys and of values [.., head_dim], and their scales [.., 2] as a cache holds them."""
    codes, scales = in_eight_bits(torch.stack((keys, values), -2))
    return codes[..., 0, :], codes[..., 1, :], scales


def writable(codes: Tensor) -> Tensor:
    """The same numbers for torch's copies by index, which know no numbers of eight bits."""
    return codes.view(torch.uint8) if codes.dtype is EIGHT_BITS else codes
