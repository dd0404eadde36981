"""Masks are bits, one a token, that say which tokens may come; a row without one may get any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
class RowMasks:
    """Written when rows are seated, on the device: of each row a mask for its first tokens, and one for the others."""

    rows: Tensor  # [n] int32, those of a step
    lengths: Tensor  # [n] int32, tokens that each of them knows
    # [rows, 2] float32: 1 if the row's second mask counts, and up to which length the first one does.
    scopes: Tensor
    bits: Tensor  # [rows, 2, words] int32


# Logits [n, vocabulary] in, new logits in float32 out: minus infinity for tokens that may not come.
MaskLogits = Callable[[Tensor, Masks | None, RowMasks | None], Tensor]


def words_of(vocabulary: int) -> int:
    """How many words of 32 bits hold a bit for every token."""
    return -(-vocabulary // BITS)


def packed(tokens: Iterable[int], vocabulary: int) -> Words:
    """[words] int32 with the bits of these tokens set; a token that the model does not have is passed over."""
    bits = np.zeros(words_of(vocabulary) * BITS, np.uint8)
    listed = np.fromiter(tokens, np.int64)
    bits[listed[listed < vocabulary]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_logits(logits: Tensor, masks: Masks | None, limits: RowMasks | None) -> Tensor:
    """As `MaskLogits` says, on a CPU: a row at a time, and only rows that have a mask."""
    masked = logits.to(torch.float32, copy=True)
    values = masked.numpy()
    for place, line in enumerate(masks.lines.tolist() if masks is not None else ()):
        if masks is not None and line >= 0:
            _forbid(values[place], masks.bits[line])
    for place, bits in enumerate(_limiting(limits) if limits is not None else ()):
        if bits is not None:
            _forbid(values[place], bits)
    return masked


def _limiting(limits: RowMasks) -> Iterator[Tensor | None]:
    """Of each row the mask that counts now."""
    scopes = limits.scopes[limits.rows].tolist()
    for row, length, (has_mask, until) in zip(limits.rows.tolist(), limits.lengths.tolist(), scopes, strict=True):
        is_early = length < until
        yield limits.bits[row, 0 if is_early else 1] if is_early or has_mask else None


def _forbid(values: NDArray[np.float32], bits: Tensor) -> None:
    """Minus infinity where no bit is set; NumPy unpacks bits ten times as fast as torch."""
    forbidden = np.unpackbits(~bits.numpy().view(np.uint8), count=len(values), bitorder="little")
    np.putmask(values, forbidden.view(np.bool_), -np.inf)
