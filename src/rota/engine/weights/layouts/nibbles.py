"""Nibbles are codes of four bits, eight in a word of 32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IN_WORD = 8
IN_ORDER = tuple(range(IN_WORD))
MASK = 15


def unpacked(words: Tensor, axis: int, order: Sequence[int] = IN_ORDER) -> Tensor:
    """uint8, eight times as many along the axis; `order` says in which nibble, from the lowest, each number lies."""
    last = words.movedim(axis, -1)
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    codes = (last.unsqueeze(-1) >> shifts).bitwise_and_(MASK).to(torch.uint8)
    return codes.flatten(-2).movedim(-1, axis)


def groups_of(first: int, end: int, size: int, device: torch.device) -> Tensor:
    """[inputs] int64: the group of each input [first, end), counted from the first input's."""
    return torch.arange(first, end, device=device) // size - first // size
