"""Precision is chosen by what is asked for, what the folder stores, and what the device multiplies in hardware."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from rota.core.config import ModelConfig
from rota.core.errors import ConfigError
from rota.engine.cpu import Processor, do_without_onednn, slowdown
from rota.engine.model.spec import DTYPES
from rota.engine.quantised.maker import MatrixMaker
from rota.engine.quantised.matrices import FourBit, GroupsFile, Kind
from rota.engine.weights.layouts.layout import Layout
from rota.engine.weights.makers import EightBitFloats, FourBitCodes, FourBitGroups

# ── precision ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Precision is chosen by what the device multiplies in hardware: numbers of 16 or 32 bits, or weights of four bits.

LOG = logging.getLogger("rota.engine")

IsAble = Callable[[torch.dtype], bool]


def choose_dtype(
    config: ModelConfig,
    folder_dtype: torch.dtype,
    device: torch.device,
    processor: Processor,
    is_able: IsAble | None = None,
) -> torch.dtype:
    """The configured precision; 'auto' takes the folder's, or the nearest that the device computes in hardware.

    A CPU never computes a bfloat16 model in float16: some values of such models are beyond float16's range, and one
    infinity makes every logit NaN. A GPU without bfloat16 does, since float32 would need twice its memory.
    """
    is_able = is_able or (lambda dtype: can_compute(dtype, device))
    is_native = is_able if device.type == "cuda" else processor.multiplies.__contains__
    if config.dtype == "auto":
        halves = [folder_dtype, torch.bfloat16] if folder_dtype is not torch.float32 else []
        if halves and device.type == "cuda":
            halves.append(torch.float16)
        return next((dtype for dtype in halves if is_native(dtype)), torch.float32)
    dtype = DTYPES[config.dtype]
    if not is_able(dtype):
        usable = [name for name, other in DTYPES.items() if is_able(other)]
        raise ConfigError(
            f"dtype is '{config.dtype}', which this {device.type} cannot compute with; use one of {', '.join(usable)}."
        )
    if device.type == "cpu" and dtype is not torch.float32 and not is_native(dtype):
        do_without_onednn()
        LOG.warning(
            f"dtype is {config.dtype}, for which this processor has no arithmetic: a product takes "
            f"{slowdown(dtype):.1f} times as long as in float32. --dtype auto would take float32."
        )
    return dtype


def choose_quantization(
    config: ModelConfig, is_stored: bool, device: torch.device, processor: Processor
) -> Kind | None:
    """A CPU's 4-bit product for a model's layers; None if the weights stay as they are.

    'auto' takes a 4-bit product only where four bits are stored: in the built-in model's file, whose adapters were
    tested so, and in AWQ and GPTQ folders.
    Where the config names a precision, 'auto' takes none: rounded weights would not be of that precision.
    """
    can_do = device.type == "cpu" and processor.four_bit is not None
    if config.quantization == "int4" and not can_do:
        reason = (
            f"the model runs on the {device.type}, and 4-bit products need a CPU"
            if device.type != "cpu"
            else "this processor has no fast product for it, which needs AVX2, AVX-512 or ARM's dot product"
        )
        raise ConfigError(f"quantization is 'int4', but {reason}. Use --quantization none.")
    is_wanted = config.quantization == "int4" or (
        config.quantization == "auto" and config.dtype == "auto" and is_stored
    )
    return processor.four_bit if is_wanted and can_do else None


def can_compute(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of this precision runs on the device, at hardware speed where it is a GPU."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        x = torch.ones(2, 8, dtype=dtype, device=device)
        functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
        functional.rms_norm(functional.linear(x, x), (2,))
    except RuntimeError:
        return False
    return True


# ── few bits ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Few bits are chosen by what is asked for, by what the folder stores and by what the device multiplies.

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
) -> MatrixMaker | None:
    """Who makes the layers' matrices; None if they have the model's precision. A CPU has no `capability`."""
    if config.quantization == "fp8":
        _refuse_float8(layout, capability)
    if capability is None:
        return _on_cpu(config, layout, groups, dtype, processor)
    return _on_gpu(config, layout, dtype, capability)


def _on_gpu(
    config: ModelConfig, layout: Layout | None, dtype: torch.dtype, capability: Capability
) -> MatrixMaker | None:
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
) -> MatrixMaker | None:
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
