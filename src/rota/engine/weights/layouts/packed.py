"""compressed-tensors' four bits: eight inputs in a word, and the zeros of eight outputs in a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rota.engine.quantised.codes import Codes
from rota.engine.weights.layouts.layout import INTEGERS, PLAIN, Layout, MatrixWindow, Rule, StoredTensors, Stretch

# ── nibbles ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Nibbles are codes of four bits, eight in a word of 32.

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


PACKED, SCALE, ZERO, SHAPE, ORDER = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"
# The code that means zero in a symmetric matrix.
MIDDLE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout(Layout):
    """weight = (code - zero) * scale; a symmetric matrix has no zeros, they are 8."""

    is_symmetric: bool
    has_order: bool  # the inputs of a group lie apart
    bits: Literal[4, 8] = 4

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        groups = -(-inputs // (self.group_size or inputs))
        words = -(-inputs // IN_WORD)
        rules = [
            Rule(suffix=PACKED, kinds=INTEGERS, shapes=((outputs, words),)),
            Rule(suffix=SCALE, kinds=PLAIN, shapes=((outputs, groups),)),
            Rule(suffix=SHAPE, kinds=("I64", "I32"), shapes=((2,),)),
        ]
        if not self.is_symmetric:
            rules.append(Rule(suffix=ZERO, kinds=INTEGERS, shapes=((-(-outputs // IN_WORD), groups),)))
        if self.has_order:
            rules.append(Rule(suffix=ORDER, kinds=INTEGERS, shapes=((inputs,),)))
        return tuple(rules)

    def read(self, tensors: StoredTensors, window: MatrixWindow) -> Codes:
        shape = tensors.read(SHAPE).tolist()
        outputs, width = tensors.shape(PACKED)
        if shape[0] != outputs or -(-shape[1] // IN_WORD) != width:
            raise tensors.error(SHAPE, f"says {shape}, which is not the shape of the matrix")
        words = tensors.read(PACKED, window.outputs, window.inputs.held_by(IN_WORD))
        codes = window.inputs.within(unpacked(words, 1), 1, IN_WORD).contiguous()
        groups, held = self._groups(tensors, window, codes.device)
        scales = tensors.scale(SCALE, window.outputs, held)
        return Codes(codes=codes, scales=scales, zeros=self._zeros(tensors, window, held, scales), groups=groups)

    def _groups(self, tensors: StoredTensors, window: MatrixWindow, device: torch.device) -> tuple[Tensor, Stretch]:
        count = tensors.shape(SCALE)[1]
        if self.has_order:
            return order_of(tensors, ORDER, window.inputs, count), Stretch(0, count)
        size = self.group_size or window.inputs.end
        return groups_of(window.inputs.first, window.inputs.end, size, device), window.inputs.held_by(size)

    def _zeros(self, tensors: StoredTensors, window: MatrixWindow, held: Stretch, scales: Tensor) -> Tensor:
        if self.is_symmetric:
            return torch.full_like(scales, MIDDLE)
        words = tensors.read(ZERO, window.outputs.held_by(IN_WORD), held)
        return window.outputs.within(unpacked(words, 0), 0, IN_WORD).float()


def order_of(tensors: StoredTensors, suffix: str, inputs: Stretch, count: int) -> Tensor:
    """[inputs] int64: the group of each input as the folder says it, of so many."""
    groups = tensors.read(suffix, inputs).long()
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise tensors.error(suffix, f"names groups that are not among the {count} of the matrix")
    return groups
