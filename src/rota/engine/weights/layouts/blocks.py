"""Eight-bit floats with a scale for each block, as DeepSeek's and Qwen's fine-grained folders store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rota.engine.weights.layouts.float8 import E4M3, WEIGHT
from rota.engine.weights.layouts.layout import PLAIN, Rule, Stretch, Tensors, Window


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """weight = code * scale; no product has scales for blocks, so a maker rounds the matrix again."""

    codes: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs, inputs] float32, each block's repeated

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        return self.codes.to(torch.float32) * self.scales


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The last blocks of a row or column may be smaller."""

    method: str
    holds: Callable[[str], bool]
    block: tuple[int, int]  # outputs, inputs
    scale: str  # the name of the scales
    bits: ClassVar[Literal[8]] = 8
    group_size: ClassVar[None] = None

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        blocks = (-(-outputs // self.block[0]), -(-inputs // self.block[1]))
        return (
            Rule(suffix=WEIGHT, kinds=E4M3, shapes=((outputs, inputs),)),
            Rule(suffix=self.scale, kinds=PLAIN, shapes=(blocks,)),
        )

    def read(self, tensors: Tensors, window: Window) -> Blocks:
        codes = tensors.read(WEIGHT, window.outputs, window.inputs)
        height, width = self.block
        held = (window.outputs.held_by(height), window.inputs.held_by(width))
        scales = tensors.scale(self.scale, *held, is_positive=True)
        rows = _repeated(scales, 0, height, window.outputs)
        return Blocks(codes, _repeated(rows, 1, width, window.inputs))


def _repeated(scales: Tensor, axis: int, size: int, stretch: Stretch) -> Tensor:
    return stretch.within(scales.repeat_interleave(size, axis), axis, size)
