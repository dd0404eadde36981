"""Folders that name their method 'fp8': AutoFP8's, with a scale for each matrix, and the fine-grained, with blocks."""

from __future__ import annotations

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.weights.layouts.blocks import BlockLayout
from rota.engine.weights.layouts.fields import only
from rota.engine.weights.layouts.float8 import Float8Layout
from rota.engine.weights.layouts.layout import Layout
from rota.engine.weights.layouts.modules import all_but, read_modules

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
