"""Compiles the decode kernel for a Hopper GPU that need not be here, and prints what became of it as JSON.

python -m tests.engine.attention.compiled
"""

from __future__ import annotations

import json
from typing import Any

import triton.language as tl

from rota.engine.attention.triton_decode import decode_kernel
from rota.engine.attention.triton_tuning import EIGHT_BIT_DECODES, DecodeTuning
from tests.engine.kernels_compiled import compile_kernel

TYPES = {
    "query": "*bf16", "tables": "*i32", "shares": "*i32", "taken": "*i32", "output": "*bf16", "partial": "*fp32",
    "logs": "*fp32", "ended": "*i32", "scale": "fp32",
}  # fmt: skip
# Llama-8B's heads.
SHAPE = {
    "HEADS": 32, "GROUP": 4, "GROUP_TILE": 16, "GROUP_ROWS": 4, "HEAD_DIM": 128, "DIMS": 128, "BLOCK_SIZE": 16,
    "APART": False, "CHAINED": True,
}  # fmt: skip


def compiled(tuning: DecodeTuning, is_eight: bool) -> Any:
    kind = "*fp8e4nv" if is_eight else "*bf16"
    types = {**TYPES, "keys": kind, "values": kind, **({"scales": "*fp32"} if is_eight else {})}
    constants: dict[str, Any] = {**SHAPE, "TILE": tuning.tile, "OPERAND": tl.float16 if is_eight else tl.bfloat16}
    if not is_eight:
        constants["scales"] = None
    return compile_kernel(
        decode_kernel, types, constants,
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers,
    )  # fmt: skip


def facts(kernel: Any) -> dict[str, int]:
    ptx: str = kernel.asm["ptx"]
    return {
        "from_eight_bits": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "to_bfloat16": ptx.count("cvt.rn.bf16.f16"),
        "shared_bytes": kernel.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps([facts(compiled(DecodeTuning(), False)), facts(compiled(EIGHT_BIT_DECODES, True))]))
