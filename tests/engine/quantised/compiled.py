"""Compiles the kernels for GPUs that are not here and prints what became of them as JSON: no GPU is needed for that.

python -m tests.engine.quantised.compiled
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rota.engine.quantised.few_rows_kernels import few_rows_kernel
from rota.runtime.lifeline import tied

# Bits, outputs and rows of a program, warps, architecture.
CASES = [(4, 128, 16, 4, 90), (4, 128, 128, 8, 90), (8, 128, 16, 4, 90), (4, 128, 16, 4, 80)]
# Pointers and strides that 16 divides, as they are in a model.
EVEN = ("x", "words", "marks", "bias", "y", "partial", "ended", "inputs", "outputs", "padded", "x_stride",
        "tile_stride", "output_stride", "step_stride")  # fmt: skip


def compiled(bits: int, columns: int, rows: int, warps: int, architecture: int) -> Any:
    constants = {
        "BITS": bits, "STEP": 128, "PER_GROUP": 1, "COLUMNS": columns, "ROWS": rows, "IS_EVEN": True,
        "IS_SHARED": True, "AT_ONCE": max(1, 8192 // (columns * rows)), "HAS_BIAS": False, "OPERAND": tl.bfloat16,
    }  # fmt: skip
    types = {"x": "*bf16", "words": "*i32", "marks": "*i32" if bits == 4 else "*fp32", "bias": "*bf16", "y": "*bf16"}
    types |= {"partial": "*fp32", "ended": "*i32"}
    names = few_rows_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {(names.index(name),): [["tt.divisibility", 16]] for name in EVEN}
    source = ASTSource(few_rows_kernel, signature, constants, even)
    return triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps, "num_stages": 3}
    )


def facts(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(tied([tool, "-res-usage", file.name]), capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None
    return {
        "registers": int(found[1]),
        "spilt_bytes": int(found[2]),
        "hopper_products": kernel.asm["ptx"].count("wgmma.mma_async"),
        "older_products": kernel.asm["ptx"].count("mma.sync"),
        "conversions": len(re.findall(r"cvt\.rn\.f32\.[su]32", kernel.asm["ptx"])),
        "shared_bytes": kernel.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps([facts(compiled(*case)) for case in CASES]))
