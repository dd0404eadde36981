"""Operations that do the work of two, as they are compiled for Llama-8B."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from rota.engine.ops import kernels
from rota.engine.ops.fused import SHAPES
from rota.engine.ops.with_adapters_kernels import add_rms_norm_kernel, rotate_and_store_kernel, silu_multiply_kernel
from tests.engine.kernels_compiled import compile_kernel, resources

TYPES = {
    "y": "*bf16", "b": "*bf16", "shrunk": "*bf16", "output": "*bf16", "residual": "*bf16", "weight": "*bf16",
    "query": "*bf16", "keys": "*bf16", "values": "*bf16", "query_norm": "*bf16", "key_norm": "*bf16",
    "x": "*bf16", "gate_up": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "rotary": "*fp32",
    "positions": "*i64", "addresses": "*i64", "epsilon": "fp32",
    "ranks": "*i32", "order": "*i32", "token_slots": "*i32",
    "tile_slots": "*i32", "tile_starts": "*i32", "tile_counts": "*i32", "gain_bias": "*fp32",
}  # fmt: skip
# A step's inputs may lie anywhere.
ANYWHERE = ("ranks", "order", "token_slots", "tile_slots", "tile_starts", "tile_counts", "positions", "addresses")
# Llama-8B with adapters of rank 16.
ADDING = {"MAX_RANK": 16, "SHARES": 1, "BY_TOKEN": True, "GAIN_BIAS": 0, "gain_bias": None, "PROGRAMMATIC": True}
# Two numbers for each of the 43,008 outputs of its 32 layers.
SLOT = 32 * 2 * 43_008
TILED = {**ADDING, "TILE": 16, "RANKS": 16, "OPERAND": tl.bfloat16}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_TILE": 64, "BLOCK_SIZE": 16, "NORMS": False, "scales": None}
ROUNDING = {"MOST": 448.0, "LEAST": 1e-30, "PROGRAMMATIC": True}
PLAIN = {**ROUNDING, "codes": None, "scales": None}
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "silu": (silu_multiply_kernel, {**TILED, "WIDTH": 14336, "COLUMNS": SHAPES.silu_columns}, SHAPES.silu_warps),
    "rotate": (rotate_and_store_kernel, {**TILED, **HEADS}, SHAPES.head_warps),
    "norm": (
        add_rms_norm_kernel,
        {**ADDING, **PLAIN, "WIDTH": 4096, "COLUMNS": 4096, "RANKS": SHAPES.norm_ranks, "IS_SMALL": True},
        4096 // 32 // SHAPES.norm_columns,
    ),
    "rounding norm": (kernels.rms_norm_kernel, {**ROUNDING, "WIDTH": 4096, "COLUMNS": 4096, "ADD": True}, 8),
    "rounding silu": (kernels.silu_multiply_kernel, {**ROUNDING, "WIDTH": 14336, "COLUMNS": 16384}, 16),
}


# The same for slots with gains and biases: the pointer is there.
KERNELS |= {
    f"{name}, trimmed": (
        kernel,
        {key: value for key, value in constants.items() if key != "gain_bias"} | {"GAIN_BIAS": SLOT},
        warps,
    )
    for name, (kernel, constants, warps) in KERNELS.items()
    if "GAIN_BIAS" in constants
}


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> Any:
    return compile_kernel(kernel, TYPES, constants, ANYWHERE, num_warps=warps, num_stages=SHAPES.stages)


def facts(kernel: Any) -> dict[str, int]:
    return {
        **resources(kernel),
        "products": kernel.asm["ptx"].count("mma.sync"),
        "wide_loads": kernel.asm["ptx"].count("ld.global.v4"),
    }


def told() -> dict[str, dict[str, int]]:
    return {name: facts(compiled(*case)) for name, case in KERNELS.items()}
