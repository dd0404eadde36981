"""Products with packed matrices, as they are compiled for two architectures."""

from __future__ import annotations

import re
from typing import Any

import triton.language as tl

from rota.engine.quantised.few_rows import few_rows_kernel
from tests.engine.kernels_compiled import compile_kernel, resources

# Bits, outputs and rows of a program, warps, architecture.
CASES = [(4, 128, 16, 4, 90), (4, 128, 128, 8, 90), (8, 128, 16, 4, 90), (4, 128, 16, 4, 80)]


def compiled(bits: int, columns: int, rows: int, warps: int, architecture: int) -> Any:
    constants = {
        "BITS": bits, "STEP": 128, "PER_GROUP": 1, "COLUMNS": columns, "ROWS": rows, "IS_EVEN": True,
        "IS_SHARED": True, "AT_ONCE": max(1, 8192 // (columns * rows)), "HAS_BIAS": False, "OPERAND": tl.bfloat16,
        "PROGRAMMATIC": architecture >= 90,
    }  # fmt: skip
    types = {"x": "*bf16", "words": "*i32", "marks": "*i32" if bits == 4 else "*fp32", "bias": "*bf16", "y": "*bf16"}
    types |= {"partial": "*fp32", "ended": "*i32"}
    return compile_kernel(few_rows_kernel, types, constants, architecture=architecture, num_warps=warps, num_stages=3)


def facts(kernel: Any) -> dict[str, int]:
    return {
        **resources(kernel),
        "hopper_products": kernel.asm["ptx"].count("wgmma.mma_async"),
        "older_products": kernel.asm["ptx"].count("mma.sync"),
        "conversions": len(re.findall(r"cvt\.rn\.f32\.[su]32", kernel.asm["ptx"])),
    }


def told() -> list[dict[str, int]]:
    return [facts(compiled(*case)) for case in CASES]
