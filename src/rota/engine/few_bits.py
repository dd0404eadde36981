"""Few bits are chosen by what is asked for, by what the folder stores and by what the device multiplies."""

from __future__ import annotations

import logging

import torch

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError
from rota.engine.cpu.processor import Processor
from rota.engine.precision import choose_quantization
from rota.engine.quantised.files import GroupsFile
from rota.engine.quantised.maker import Maker
from rota.engine.quantised.matrices import FourBit
from rota.engine.weights.layouts.layout import Layout
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups

LOG = logging.getLogger("rota.engine")

# The first GPUs whose tensor cores multiply eight-bit floats: Ada, and Hopper after it.
FLOAT8_CAPABILITY = (8, 9)

Capability = tuple[int, int]


def choose_maker(
    config: ModelConfig,
    layout: Layout | None,
    groups: GroupsFile,
    dtype: torch.dtype,
    processor: Processor,
    capability: Capability | None,
) -> Maker | None:
    """Who makes the layers' matrices; None if they have the model's precision. A CPU has no `capability`."""
    if config.quantization == "fp8":
        _refuse_float8(layout, capability)
    if capability is None:
        return _on_cpu(config, layout, groups, dtype, processor)
    return _on_gpu(config, layout, dtype, capability)


def _on_gpu(config: ModelConfig, layout: Layout | None, dtype: torch.dtype, capability: Capability) -> Maker | None:
    asked = config.quantization
    if asked == "int4" and (layout is None or layout.bits == 8):
        raise _no_int4(layout)
    if layout is None or asked == "none":
        return EightBitFloats() if asked == "fp8" else None
    if layout.bits == 4:
        return FourBitCodes(layout.holds, layout.group_size, dtype)
    if capability >= FLOAT8_CAPABILITY:
        return EightBitFloats(layout.holds)
    LOG.warning(
        f"The model's weights are in {layout.method}, which this GPU (compute capability {_words(capability)}) cannot "
        f"multiply: they take the form of {dtype}, and twice the memory."
    )
    return None


def _on_cpu(
    config: ModelConfig, layout: Layout | None, groups: GroupsFile, dtype: torch.dtype, processor: Processor
) -> Maker | None:
    """Four bits that a folder stores count like those of the built-in model; eight-bit floats become plain."""
    is_stored = layout is not None and layout.bits == 4
    kind = choose_quantization(config, groups.is_there or is_stored, torch.device("cpu"), processor)
    if kind is None:
        return None
    four_bit = FourBit(kind, groups)
    return FourBitGroups(layout.holds, four_bit, dtype) if layout is not None and is_stored else four_bit


def _refuse_float8(layout: Layout | None, capability: Capability | None) -> None:
    if capability is None or capability < FLOAT8_CAPABILITY:
        where = "the CPU" if capability is None else f"a GPU of compute capability {_words(capability)}"
        raise ConfigError(
            f"quantization is 'fp8', but the model runs on {where}, and products in eight-bit floats need a GPU of "
            f"{_words(FLOAT8_CAPABILITY)} or more (Ada, Hopper or newer). Use --quantization auto."
        )
    if layout is not None and layout.bits == 4:
        raise ConfigError(
            f"quantization is 'fp8', but the folder's weights are in four bits already ({layout.method}). Use "
            "--quantization auto, or a folder with plain weights."
        )


def _no_int4(layout: Layout | None) -> ConfigError:
    stored = "plain" if layout is None else f"in {layout.method}"
    return ConfigError(
        f"quantization is 'int4', but the model runs on a GPU, which has four bits only from an AWQ or GPTQ folder, "
        f"and this folder's weights are {stored}. Use --quantization fp8 or auto."
    )


def _words(capability: Capability) -> str:
    return ".".join(map(str, capability))
