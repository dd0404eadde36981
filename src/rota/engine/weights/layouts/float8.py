"""Eight-bit floats (E4M3) with one scale for a matrix or for each output: AutoFP8's and compressed-tensors'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from rota.engine.quantised.codes import Scaled
from rota.engine.weights.layouts.layout import PLAIN, Rule, Tensors, Window

WEIGHT, SCALE, INPUT_SCALE = "weight", "weight_scale", "input_scale"
E4M3 = ("F8_E4M3",)
# The shapes of a single scale.
ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Layout:
    """weight = code * scale. Activations get a scale for each token, so a static scale is checked and not used."""

    method: str
    holds: Callable[[str], bool]
    has_input_scale: bool = False
    bits: ClassVar[Literal[8]] = 8
    group_size: ClassVar[None] = None

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        rules = (
            Rule(suffix=WEIGHT, kinds=E4M3, shapes=((outputs, inputs),)),
            Rule(suffix=SCALE, kinds=PLAIN, shapes=(*ONE, (outputs,), (outputs, 1))),
        )
        return (*rules, input_rule()) if self.has_input_scale else rules

    def read(self, tensors: Tensors, window: Window) -> Scaled:
        if self.has_input_scale:
            tensors.scale(INPUT_SCALE, is_positive=True)
        codes = tensors.read(WEIGHT, window.outputs, window.inputs)
        is_one = tensors.shape(SCALE) in ONE
        scale = tensors.scale(SCALE, *(() if is_one else (window.outputs,)), is_positive=True)
        return Scaled(codes, scale.reshape(-1).expand(len(window.outputs)).contiguous())


def input_rule() -> Rule:
    return Rule(suffix=INPUT_SCALE, kinds=PLAIN, shapes=ONE)
