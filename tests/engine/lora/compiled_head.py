"""Compiles the kernel of own heads for a Hopper GPU that need not be here, and prints what became of it as JSON.

python -m tests.engine.lora.compiled_head
"""

from __future__ import annotations

import json

import triton.language as tl

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.triton_ends import COLUMNS, STAGES, STEP, WARPS
from rota.engine.lora.triton_head_kernel import own_head_kernel
from tests.engine.kernels_compiled import compile_kernel, resources
from tests.engine.lora.compiled import ANYWHERE

# Llama-8B's.
HEAD = {"MATRIX": 128_256 * 4096, "INPUTS": 4096, "OUTPUTS": 128_256}
TYPES = {**dict.fromkeys((*ANYWHERE, "heads"), "*i32"), **dict.fromkeys(("logits", "x", "matrices"), "*bf16")}

if __name__ == "__main__":
    constants = {**HEAD, "TILE": DECODE_TILE, "COLUMNS": COLUMNS, "STEP": STEP, "OPERAND": tl.bfloat16}
    kernel = compile_kernel(own_head_kernel, TYPES, constants, (*ANYWHERE, "heads"), num_warps=WARPS, num_stages=STAGES)
    print(json.dumps(resources(kernel)))
