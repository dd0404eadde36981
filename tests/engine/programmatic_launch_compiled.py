"""Compiles kernels of a chain for a Hopper GPU that need not be here, and prints as JSON what they do before they wait.

python -m tests.engine.programmatic_launch_compiled
"""

from __future__ import annotations

import json
from typing import Any

import triton.language as tl

from rota.engine.model.gemm_choice import NARROW
from rota.engine.ops.kernels import rms_norm_kernel, silu_multiply_kernel
from rota.engine.quantised.codes import LARGEST, SMALLEST
from rota.engine.row_product import row_product_kernel
from tests.engine.kernels_compiled import compile_kernel

TYPES = {
    "x": "*bf16", "matrix": "*bf16", "bias": "*bf16", "y": "*bf16", "partial": "*fp32", "ended": "*i32",
    "residual": "*bf16", "weight": "*bf16", "output": "*bf16", "gate_up": "*bf16", "epsilon": "fp32",
}  # fmt: skip
COLUMNS, STEP, STAGES, WARPS = NARROW
PRODUCT = {
    "x_scales": None, "scales": None, "STEP": STEP, "COLUMNS": COLUMNS, "ROWS": 16, "IS_SHARED": True, "AT_ONCE": 8,
    "HAS_BIAS": False, "OPERAND": tl.bfloat16, "AHEAD": 2,
}  # fmt: skip
NO_CODES = {"codes": None, "scales": None, "MOST": LARGEST, "LEAST": SMALLEST}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "product": (row_product_kernel, PRODUCT),
    "norm": (rms_norm_kernel, {"WIDTH": 4096, "COLUMNS": 4096, "ADD": True, **NO_CODES}),
    "silu": (silu_multiply_kernel, {"WIDTH": 14336, "COLUMNS": 2048, **NO_CODES}),
}


def facts(kernel: Any, constants: dict[str, Any], is_programmatic: bool) -> dict[str, int]:
    made = compile_kernel(
        kernel,
        TYPES,
        {**constants, "PROGRAMMATIC": is_programmatic},
        num_warps=WARPS,
        num_stages=STAGES,
        launch_pdl=is_programmatic,
    )
    before, _, after = made.asm["ptx"].partition("griddepcontrol.wait")
    return {
        "loads_before": before.count("ld.global") + before.count("cp.async"),
        "stores_before": before.count("st.global"),
        "prefetches_before": before.count("prefetch.global"),
        "waits": made.asm["ptx"].count("griddepcontrol.wait"),
        "signals": after.count("griddepcontrol.launch_dependents"),
    }


if __name__ == "__main__":
    programmatic, alone = (
        {name: facts(*case, is_programmatic) for name, case in KERNELS.items()} for is_programmatic in (True, False)
    )
    print(json.dumps({"chained": programmatic, "alone": alone}))
