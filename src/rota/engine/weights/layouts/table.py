"""The table of layouts: a folder names its method, and the table has the file that reads the method's config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile
from rota.engine.weights.layouts.awq_gptq import read_awq, read_gptq
from rota.engine.weights.layouts.compressed import read_compressed
from rota.engine.weights.layouts.fp8 import read_fp8
from rota.engine.weights.layouts.layout import Layout

METHODS: dict[str, Callable[[ConfigFile], Layout]] = {
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
}
# What works instead of a method that Rota does not read.
NEAREST = {
    "bitsandbytes": "the plain model with --quantization fp8, or an AWQ or GPTQ version",
    "mxfp4": "an AWQ or GPTQ version",
    "modelopt": "the plain model with --quantization fp8, or a compressed-tensors version",
    "fbgemm_fp8": "the plain model with --quantization fp8, or a compressed-tensors version",
    "torchao": "the plain model with --quantization fp8, or a compressed-tensors version",
}
ANYTHING = "the plain model, or an FP8, AWQ or GPTQ version"


def read_layout(folder: Path) -> Layout | None:
    """How a model folder stores its matrices; None: plain. Only config.json is read."""
    config = ConfigFile(folder / "config.json")
    field = "quantization_config" if config.get("quantization_config") else "compression_config"
    section = config.section(field)
    if not section:
        return None
    method = str(section.get("quant_method") or section.get("quantization_method") or "no method")
    read = METHODS.get(method)
    if read is None:
        raise ModelError(
            f"{config.path} describes weights quantised by {method}, which Rota does not read; it reads "
            f"{', '.join(METHODS)}. Serve {NEAREST.get(method, ANYTHING)}."
        )
    return read(ConfigFile(config.path, section))
