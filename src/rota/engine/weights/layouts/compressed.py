"""compressed-tensors' configs: groups of modules, each with the form of its weights and of its activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rota.engine.model.config_file import ConfigFile
from rota.engine.weights.layouts.fp8 import SCALE, BlockLayout, Float8Layout, read_block
from rota.engine.weights.layouts.layout import (
    NIBBLE,
    Layout,
    checked_modules,
    only,
    read_group_size,
    read_modules,
    refusal,
)
from rota.engine.weights.layouts.packed import PackedLayout

METHOD = "compressed-tensors"
NEAREST = "'float-quantized' in eight bits and 'pack-quantized' in four"


def read_compressed(config: ConfigFile) -> Layout:
    """From a config's section `quantization_config`."""
    for field in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        _refuse_more(config, field)
    groups = config.section("config_groups")
    if len(groups) != 1:
        raise refusal(
            config, f"{METHOD} weights in {len(groups)} forms", "those with one form, in one of config_groups"
        )
    group = ConfigFile(config.path, config.section("config_groups"))
    scheme = ConfigFile(config.path, group.section(next(iter(groups))))
    weights = ConfigFile(config.path, scheme.section("weights"))
    targets = checked_modules(config, "targets", scheme.get("targets", ["Linear"]))
    ignored = read_modules(config, "ignore")
    read = FORMATS.get(str(scheme.get("format", config.get("format"))))
    if read is None:
        raise refusal(config, f"{METHOD} weights of the format {config.get('format')!r}", NEAREST)
    return read(
        weights, scheme.section("input_activations"), lambda module: module in targets and module not in ignored
    )


def _refuse_more(config: ConfigFile, field: str) -> None:
    """Fields that change the numbers, if they say anything."""
    found = config.get(field)
    if isinstance(found, dict) and found.get("format", "dense") == "dense" and not found.keys() - {"format"}:
        return
    if found:
        nearest = "weights alone; --kv-cache-dtype fp8 needs no stored scales" if "kv_" in field else "those without"
        raise refusal(config, f"{METHOD} weights with a '{field}'", nearest)


def _read_floats(weights: ConfigFile, activations: dict[str, Any], holds: Callable[[str], bool]) -> Layout:
    _need(weights, {"num_bits": 8, "type": "float", "symmetric": True})
    rounds = ConfigFile(weights.path, activations)
    if activations:
        _need(rounds, {"num_bits": 8, "type": "float"})
    if weights.get("strategy") == "block":
        block = read_block(weights, "block_structure")
        return BlockLayout(method=f"{METHOD} FP8", holds=holds, block=block, scale=SCALE)
    only(weights, "strategy", ("tensor", "channel"), f"{METHOD} weights in FP8", "scales by tensor, channel or block")
    has_scale = bool(activations) and not rounds.flag("dynamic")
    return Float8Layout(method=f"{METHOD} FP8", holds=holds, has_input_scale=has_scale)


def _read_packed(weights: ConfigFile, activations: dict[str, Any], holds: Callable[[str], bool]) -> Layout:
    _need(weights, {"num_bits": NIBBLE, "type": "int"})
    if activations:
        raise refusal(weights, f"{METHOD} weights in four bits with rounded activations", "weights in four bits alone")
    strategy = weights.get("strategy", "group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise refusal(weights, f"{METHOD} weights in four bits by {strategy!r}", "those by 'group' or 'channel'")
    return PackedLayout(
        method=f"{METHOD} in four bits",
        holds=holds,
        group_size=read_group_size(weights, "group_size") if strategy == "group" else None,
        is_symmetric=weights.flag("symmetric", True),
        has_order=weights.get("actorder") in (True, "group"),
    )


def _need(config: ConfigFile, values: dict[str, Any]) -> None:
    for field, value in values.items():
        only(config, field, (value,), f"{METHOD} weights or activations", NEAREST)


FORMATS = {"float-quantized": _read_floats, "naive-quantized": _read_floats, "pack-quantized": _read_packed}
