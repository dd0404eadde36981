"""Attention as it is compiled for Llama-8B."""

from __future__ import annotations

import re
from typing import Any

import triton.language as tl

from rota.engine.attention.triton_attention import EIGHT_BIT_DECODES, EIGHT_BIT_PREFILLS, DecodeTuning, PrefillTuning
from rota.engine.attention.triton_decode import decode_kernel
from rota.engine.attention.triton_prefill import prefill_kernel
from tests.engine.kernels_compiled import compile_kernel

NUMBERS = ("tables", "shares", "taken", "ended", "rows", "starts", "offsets")
TYPES = {
    **dict.fromkeys(NUMBERS, "*i32"),
    "query": "*bf16", "output": "*bf16", "partial": "*fp32", "logs": "*fp32", "scale": "fp32",
}  # fmt: skip
# Llama-8B's heads.
SHAPE = {"HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "DIMS": 128, "BLOCK_SIZE": 16}
DECODE = {**SHAPE, "GROUP_TILE": 16, "GROUP_ROWS": 4, "APART": False, "PROGRAMMATIC": True}


def compiled(tuning: DecodeTuning, is_eight: bool) -> Any:
    types, constants = held(is_eight)
    return compile_kernel(
        decode_kernel, types, {**DECODE, **constants, "TILE": tuning.tile},
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers,
    )  # fmt: skip


def compiled_prefill(tuning: PrefillTuning, is_eight: bool) -> Any:
    types, constants = held(is_eight)
    constants |= {"TILE": tuning.tile, "QUERIES": tuning.queries, "WINDOWED": False}
    return compile_kernel(
        prefill_kernel, types, {**SHAPE, **constants}, NUMBERS, num_warps=tuning.warps, num_stages=tuning.stages
    )


def held(is_eight: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The types and the constants of a cache in eight bits, or in 16."""
    kind = "*fp8e4nv" if is_eight else "*bf16"
    types = {**TYPES, "keys": kind, "values": kind, **({"scales": "*fp32"} if is_eight else {})}
    return types, {"OPERAND": tl.float16} if is_eight else {"OPERAND": tl.bfloat16, "scales": None}


def facts(kernel: Any) -> dict[str, int]:
    ptx: str = kernel.asm["ptx"]
    return {
        "from_eight_bits": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "to_bfloat16": ptx.count("cvt.rn.bf16.f16"),
        "copies_of_4_bytes": len(re.findall(r"cp\.async\.ca\.shared\.global .*, 0x4,", ptx)),
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10,", ptx)),
        "shared_bytes": kernel.metadata.shared,
    }


def told() -> list[dict[str, int]]:
    kernels = (
        compiled(DecodeTuning(), False),
        compiled(EIGHT_BIT_DECODES, True),
        compiled_prefill(EIGHT_BIT_PREFILLS, True),
    )
    return [facts(kernel) for kernel in kernels]
