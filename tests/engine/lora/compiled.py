"""Compiles the kernels of adapters for a Hopper GPU that need not be here, and prints what became of them as JSON.

python -m tests.engine.lora.compiled
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.pages import PAGE_RANK
from rota.engine.lora.triton_kernels import expand_kernel, shrink_kernel
from rota.engine.lora.triton_ops import DECODE, Tuning
from rota.runtime.lifeline import tied

TYPES = {
    **dict.fromkeys(("ranks", "table", "order", "tile_slots", "tile_starts", "tile_counts"), "*i32"),
    **dict.fromkeys(("x", "a", "b", "y"), "*bf16"),
    "partial": "*fp32",
}
EVEN = ("x", "a", "b", "y", "partial", "shrunk", "x_stride", "y_stride", "s_stride")
# Llama-8B's qkv, slots of rank 64.
SITE = {"PARTS": 3, "MAX_RANK": 64, "OPERAND": tl.bfloat16}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], page: int, warps: int, stages: int) -> Any:
    constants = {**SITE, **constants, "PAGE": page, **({} if page else {"table": None})}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {(names.index(name),): [["tt.divisibility", 16]] for name in EVEN if name in names}
    source = ASTSource(kernel, signature, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


def shrink(tuning: Tuning, tile: int, page: int) -> Any:
    shapes = tuning.shrink
    constants = {"INPUTS": 4096, "TILE": tile, "ROWS": shapes.rows, "SHARE": shapes.share, "STEP": shapes.step}
    return compiled(shrink_kernel, TYPES, constants, page, shapes.warps, shapes.stages)


def expand(tuning: Tuning, tile: int, by_token: bool, page: int) -> Any:
    shapes = tuning.expand
    constants = {
        "FIRST": 4096, "SECOND": 1024, "THIRD": 1024, "SHARES": 1 if by_token else 8, "TILE": tile,
        "COLUMNS": shapes.columns, "RANKS": shapes.ranks, "BY_TOKEN": by_token,
    }  # fmt: skip
    types = {**TYPES, "shrunk": "*bf16" if by_token else "*fp32"}
    return compiled(expand_kernel, types, constants, page, shapes.warps, 1)


def facts(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(tied([tool, "-res-usage", file.name]), capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(found[1]),
        "spilt_bytes": int(found[2]),
        "pointers": len(re.findall(r"\.param \.u64 \.ptr", ptx)),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4|cp\.async\.cg", ptx)),
    }


def pair(make: Callable[[int], Any]) -> list[dict[str, int]]:
    """A kernel's facts without pages and with them."""
    return [facts(make(page)) for page in (0, PAGE_RANK)]


if __name__ == "__main__":
    print(
        json.dumps(
            [
                pair(partial(shrink, DECODE, DECODE_TILE)),
                pair(partial(expand, DECODE, DECODE_TILE, False)),
                pair(partial(expand, DECODE, DECODE_TILE, True)),
            ]
        )
    )
