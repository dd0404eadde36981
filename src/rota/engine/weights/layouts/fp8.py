"""Folders that name their method 'fp8': AutoFP8's, with a scale for each matrix, and the fine-grained, with blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.quantised.codes import Scaled
from rota.engine.weights.layouts.layout import (
    PLAIN,
    Layout,
    MatrixWindow,
    Rule,
    StoredTensors,
    Stretch,
    all_but,
    only,
    read_modules,
)

# ── float8 ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Eight-bit floats (E4M3) with one scale for a matrix or for each output: AutoFP8's and compressed-tensors'.

WEIGHT, SCALE, INPUT_SCALE = "weight", "weight_scale", "input_scale"
E4M3 = ("F8_E4M3",)
# The shapes of a single scale.
ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Layout(Layout):
    """weight = code * scale. Activations get a scale for each token, so a static scale is checked and not used."""

    has_input_scale: bool = False
    bits: Literal[4, 8] = 8

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        rules = (
            Rule(suffix=WEIGHT, kinds=E4M3, shapes=((outputs, inputs),)),
            Rule(suffix=SCALE, kinds=PLAIN, shapes=(*ONE, (outputs,), (outputs, 1))),
        )
        input_rule = Rule(suffix=INPUT_SCALE, kinds=PLAIN, shapes=ONE)
        return (*rules, input_rule) if self.has_input_scale else rules

    def read(self, tensors: StoredTensors, window: MatrixWindow) -> Scaled:
        if self.has_input_scale:
            tensors.scale(INPUT_SCALE, is_positive=True)
        codes = tensors.read(WEIGHT, window.outputs, window.inputs)
        is_one = tensors.shape(SCALE) in ONE
        scale = tensors.scale(SCALE, *(() if is_one else (window.outputs,)), is_positive=True)
        return Scaled(codes, scale.reshape(-1).expand(len(window.outputs)).contiguous())


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Eight-bit floats with a scale for each block, as DeepSeek's and Qwen's fine-grained folders store them.


@dataclass(frozen=True, slots=True, eq=False)
class BlockScaled:
    """weight = code * scale; no product has scales for blocks, so a maker rounds the matrix again."""

    codes: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs, inputs] float32, each block's repeated

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        return self.codes.to(torch.float32) * self.scales


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout(Layout):
    """The last blocks of a row or column may be smaller."""

    block: tuple[int, int]  # outputs, inputs
    scale: str  # the name of the scales
    bits: Literal[4, 8] = 8

    def rules(self, outputs: int, inputs: int) -> tuple[Rule, ...]:
        blocks = (-(-outputs // self.block[0]), -(-inputs // self.block[1]))
        return (
            Rule(suffix=WEIGHT, kinds=E4M3, shapes=((outputs, inputs),)),
            Rule(suffix=self.scale, kinds=PLAIN, shapes=(blocks,)),
        )

    def read(self, tensors: StoredTensors, window: MatrixWindow) -> BlockScaled:
        codes = tensors.read(WEIGHT, window.outputs, window.inputs)
        height, width = self.block
        held = (window.outputs.held_by(height), window.inputs.held_by(width))
        scales = tensors.scale(self.scale, *held, is_positive=True)
        rows = _repeated(scales, 0, height, window.outputs)
        return BlockScaled(codes, _repeated(rows, 1, width, window.inputs))


def _repeated(scales: Tensor, axis: int, size: int, stretch: Stretch) -> Tensor:
    return stretch.within(scales.repeat_interleave(size, axis), axis, size)


BLOCK_SCALE = "weight_scale_inv"


def read_fp8(config: ConfigFile) -> Layout:
    """From a config's section `quantization_config`."""
    only(config, "fmt", ("e4m3",), "FP8 weights in another format", "E4M3")
    only(config, "activation_scheme", ("dynamic", "static"), "FP8 activations of another scheme", "dynamic and static")
    is_static = config.get("activation_scheme") == "static"
    left_out = read_modules(config, "modules_to_not_convert", "ignored_layers")
    if config.get("weight_block_size") is None:
        return Float8Layout(method="FP8", holds=all_but(left_out), has_input_scale=is_static)
    if is_static:
        raise ModelError(
            f"{config.path} describes FP8 weights in blocks with static activations, which Rota does not read; it "
            "reads blocks with dynamic activations."
        )
    block = read_block(config, "weight_block_size")
    return BlockLayout(method="FP8 in blocks", holds=all_but(left_out), block=block, scale=BLOCK_SCALE)


def read_block(config: ConfigFile, field: str) -> tuple[int, int]:
    """The outputs and inputs of a block."""
    value = config.get(field)
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in value):
        raise ModelError(f"{config.path}: '{field}' must be two whole numbers, not {value!r}.")
    return value[0], value[1]
