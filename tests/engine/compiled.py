"""Compiles kernels for GPUs that need not be here, and prints what became of them as JSON.

python -m tests.engine.compiled
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rota.engine.attention.triton_attention import EIGHT_BIT_DECODES, EIGHT_BIT_PREFILLS, DecodeTuning, PrefillTuning
from rota.engine.attention.triton_decode import decode_kernel
from rota.engine.attention.triton_prefill import prefill_kernel
from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.files.ranks import PAGE_RANK
from rota.engine.lora.triton_embed_head import COLUMNS, STAGES, STEP, WARPS, own_head_kernel
from rota.engine.lora.triton_ops import DECODE, LoraTuning, expand_kernel, shrink_kernel
from rota.engine.model.gemm_choice import NARROW
from rota.engine.ops import kernels
from rota.engine.ops.fused import SHAPES
from rota.engine.ops.with_adapters_kernels import add_rms_norm_kernel, rotate_and_store_kernel, silu_multiply_kernel
from rota.engine.quantised.codes import LARGEST, SMALLEST
from rota.engine.quantised.few_rows import few_rows_kernel
from rota.engine.row_product import row_product_kernel
from rota.runtime.lifeline import tied

HOPPER = 90


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: dict[str, Any],
    anywhere: Collection[str] = (),
    architecture: int = HOPPER,
    **options: int | None,
) -> Any:
    """A number without a type is an int32. 16 divides pointers and strides, but for pointers to anywhere."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in anywhere and (signature[name].startswith("*") or name.endswith("stride"))
    }
    source = ASTSource(kernel, signature, constants, even)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@contextmanager
def without_machine_code() -> Iterator[None]:
    """For facts that stand in the PTX: nothing is assembled, which takes a third of the time."""

    def hook(*asked: Any) -> tuple[str, str]:
        if asked:
            _, stages, *_ = asked
            stages["cubin"] = lambda *_: b""
        return "ptx", "ptx"  # the name of what is kept in Triton's cache

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = hook
        yield


def resources(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(tied([tool, "-res-usage", file.name]), capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None
    return {"registers": int(found[1]), "spilt_bytes": int(found[2]), "shared_bytes": kernel.metadata.shared}


# Attention as it is compiled for Llama-8B.

ATTENTION_NUMBERS = ("tables", "shares", "taken", "ended", "rows", "starts", "offsets")
ATTENTION_TYPES = {
    **dict.fromkeys(ATTENTION_NUMBERS, "*i32"),
    "query": "*bf16", "output": "*bf16", "partial": "*fp32", "logs": "*fp32", "scale": "fp32",
}  # fmt: skip
# Llama-8B's heads.
ATTENTION_SHAPE = {"HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "DIMS": 128, "BLOCK_SIZE": 16}
ATTENTION_DECODE = {**ATTENTION_SHAPE, "GROUP_TILE": 16, "GROUP_ROWS": 4, "APART": False, "PROGRAMMATIC": True}


def compiled_decode(tuning: DecodeTuning, is_eight: bool) -> Any:
    types, constants = held(is_eight)
    return compile_kernel(
        decode_kernel, types, {**ATTENTION_DECODE, **constants, "TILE": tuning.tile},
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers,
    )  # fmt: skip


def compiled_prefill(tuning: PrefillTuning, is_eight: bool) -> Any:
    types, constants = held(is_eight)
    constants |= {"TILE": tuning.tile, "QUERIES": tuning.queries, "WINDOWED": False}
    return compile_kernel(
        prefill_kernel,
        types,
        {**ATTENTION_SHAPE, **constants},
        ATTENTION_NUMBERS,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def held(is_eight: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The types and the constants of a cache in eight bits, or in 16."""
    kind = "*fp8e4nv" if is_eight else "*bf16"
    types = {**ATTENTION_TYPES, "keys": kind, "values": kind, **({"scales": "*fp32"} if is_eight else {})}
    return types, {"OPERAND": tl.float16} if is_eight else {"OPERAND": tl.bfloat16, "scales": None}


def facts_of_attention(kernel: Any) -> dict[str, int]:
    ptx: str = kernel.asm["ptx"]
    return {
        "from_eight_bits": ptx.count("cvt.rn.f16x2.e4m3x2"),
        "to_bfloat16": ptx.count("cvt.rn.bf16.f16"),
        "copies_of_4_bytes": len(re.findall(r"cp\.async\.ca\.shared\.global .*, 0x4,", ptx)),
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10,", ptx)),
        "shared_bytes": kernel.metadata.shared,
    }


@without_machine_code()
def told_of_attention() -> list[dict[str, int]]:
    kernels = (
        compiled_decode(DecodeTuning(), False),
        compiled_decode(EIGHT_BIT_DECODES, True),
        compiled_prefill(EIGHT_BIT_PREFILLS, True),
    )
    return [facts_of_attention(kernel) for kernel in kernels]


# The kernels of adapters, as they are compiled for Llama-8B.

# A step's inputs may lie anywhere.
LORA_ANYWHERE = ("ranks", "table", "order", "tile_slots", "tile_starts", "tile_counts")
LORA_TYPES = {
    **dict.fromkeys((*LORA_ANYWHERE, "heads"), "*i32"),
    **dict.fromkeys(("x", "a", "b", "y", "logits", "matrices"), "*bf16"),
    "partial": "*fp32",
    "gain_bias": "*fp32",
}
# Llama-8B's qkv, slots of rank 64.
SITE = {"PARTS": 3, "MAX_RANK": 64, "OPERAND": tl.bfloat16}
# Two numbers for each of the 43,008 outputs of its 32 layers.
SLOT = 32 * 2 * 43_008
HEAD = {"MATRIX": 128_256 * 4096, "INPUTS": 4096, "OUTPUTS": 128_256, "TILE": DECODE_TILE, "OPERAND": tl.bfloat16}


def compiled_for_adapters(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], page: int, warps: int, stages: int
) -> Any:
    constants = {**SITE, **constants, "PAGE": page, **({} if page else {"table": None})}
    return compile_kernel(kernel, types, constants, LORA_ANYWHERE, num_warps=warps, num_stages=stages)


def shrink(tuning: LoraTuning, tile: int, page: int) -> Any:
    shapes = tuning.shrink
    constants = {"INPUTS": 4096, "TILE": tile, "ROWS": shapes.rows, "SHARE": shapes.share, "STEP": shapes.step}
    return compiled_for_adapters(shrink_kernel, LORA_TYPES, constants, page, shapes.warps, shapes.stages)


def expand(tuning: LoraTuning, tile: int, by_token: bool, page: int, apply_gain_bias: int = 0) -> Any:
    shapes = tuning.expand
    constants = {
        "FIRST": 4096, "SECOND": 1024, "THIRD": 1024, "SHARES": 1 if by_token else 8, "TILE": tile,
        "COLUMNS": shapes.columns, "RANKS": shapes.ranks, "BY_TOKEN": by_token, "GAIN_BIAS": apply_gain_bias,
        **({} if apply_gain_bias else {"gain_bias": None}),
    }  # fmt: skip
    types = {**LORA_TYPES, "shrunk": "*bf16" if by_token else "*fp32"}
    return compiled_for_adapters(expand_kernel, types, constants, page, shapes.warps, 1)


def facts_of_adapters(kernel: Any) -> dict[str, int]:
    ptx = kernel.asm["ptx"]
    return {
        **resources(kernel),
        "pointers": len(re.findall(r"\.param \.u64 \.ptr", ptx)),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4|cp\.async\.cg", ptx)),
    }


def pair(make: Callable[[int], Any]) -> list[dict[str, int]]:
    """A kernel's facts without pages and with them."""
    return [facts_of_adapters(make(page)) for page in (0, PAGE_RANK)]


def own_head() -> dict[str, int]:
    constants = {**HEAD, "COLUMNS": COLUMNS, "STEP": STEP}
    return resources(
        compile_kernel(
            own_head_kernel, LORA_TYPES, constants, (*LORA_ANYWHERE, "heads"), num_warps=WARPS, num_stages=STAGES
        )
    )


def told_of_adapters() -> dict[str, Any]:
    expands = [partial(expand, DECODE, DECODE_TILE, by_token) for by_token in (False, True)]
    return {
        "without pages and with them": [pair(one) for one in (partial(shrink, DECODE, DECODE_TILE), *expands)],
        "without trims and with them": [
            [facts_of_adapters(one(page, apply_gain_bias)) for apply_gain_bias in (0, SLOT)]
            for one in expands
            for page in (0, PAGE_RANK)
        ],
        "own head": own_head(),
    }


# Operations that do the work of two, as they are compiled for Llama-8B.

OPERATION_TYPES = {
    "y": "*bf16", "b": "*bf16", "shrunk": "*bf16", "output": "*bf16", "residual": "*bf16", "weight": "*bf16",
    "query": "*bf16", "keys": "*bf16", "values": "*bf16", "query_norm": "*bf16", "key_norm": "*bf16",
    "x": "*bf16", "gate_up": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "rotary": "*fp32",
    "positions": "*i64", "addresses": "*i64", "epsilon": "fp32",
    "ranks": "*i32", "order": "*i32", "token_slots": "*i32",
    "tile_slots": "*i32", "tile_starts": "*i32", "tile_counts": "*i32", "gain_bias": "*fp32",
}  # fmt: skip
# A step's inputs may lie anywhere.
OPERATION_ANYWHERE = (
    "ranks",
    "order",
    "token_slots",
    "tile_slots",
    "tile_starts",
    "tile_counts",
    "positions",
    "addresses",
)
# Llama-8B with adapters of rank 16.
ADDING = {"MAX_RANK": 16, "SHARES": 1, "BY_TOKEN": True, "GAIN_BIAS": 0, "gain_bias": None, "PROGRAMMATIC": True}
TILED = {**ADDING, "TILE": 16, "RANKS": 16, "OPERAND": tl.bfloat16}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_TILE": 64, "BLOCK_SIZE": 16, "NORMS": False, "scales": None}
ROUNDING = {"MOST": 448.0, "LEAST": 1e-30, "PROGRAMMATIC": True}
PLAIN = {**ROUNDING, "codes": None, "scales": None}
OPERATIONS: dict[str, tuple[Any, dict[str, Any], int]] = {
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
OPERATIONS |= {
    f"{name}, trimmed": (
        kernel,
        {key: value for key, value in constants.items() if key != "gain_bias"} | {"GAIN_BIAS": SLOT},
        warps,
    )
    for name, (kernel, constants, warps) in OPERATIONS.items()
    if "GAIN_BIAS" in constants
}


def compiled_operation(kernel: Any, constants: dict[str, Any], warps: int) -> Any:
    return compile_kernel(
        kernel, OPERATION_TYPES, constants, OPERATION_ANYWHERE, num_warps=warps, num_stages=SHAPES.stages
    )


def facts_of_operation(kernel: Any) -> dict[str, int]:
    return {
        **resources(kernel),
        "products": kernel.asm["ptx"].count("mma.sync"),
        "wide_loads": kernel.asm["ptx"].count("ld.global.v4"),
    }


def told_of_operations() -> dict[str, dict[str, int]]:
    return {name: facts_of_operation(compiled_operation(*case)) for name, case in OPERATIONS.items()}


# Products with packed matrices, as they are compiled for two architectures.

# Bits, outputs and rows of a program, warps, architecture.
CASES = [(4, 128, 16, 4, 90), (4, 128, 128, 8, 90), (8, 128, 16, 4, 90), (4, 128, 16, 4, 80)]


def compiled_product(bits: int, columns: int, rows: int, warps: int, architecture: int) -> Any:
    constants = {
        "BITS": bits, "STEP": 128, "PER_GROUP": 1, "COLUMNS": columns, "ROWS": rows, "IS_EVEN": True,
        "IS_SHARED": True, "AT_ONCE": max(1, 8192 // (columns * rows)), "HAS_BIAS": False, "OPERAND": tl.bfloat16,
        "PROGRAMMATIC": architecture >= 90,
    }  # fmt: skip
    types = {"x": "*bf16", "words": "*i32", "marks": "*i32" if bits == 4 else "*fp32", "bias": "*bf16", "y": "*bf16"}
    types |= {"partial": "*fp32", "ended": "*i32"}
    return compile_kernel(few_rows_kernel, types, constants, architecture=architecture, num_warps=warps, num_stages=3)


def facts_of_product(kernel: Any) -> dict[str, int]:
    return {
        **resources(kernel),
        "hopper_products": kernel.asm["ptx"].count("wgmma.mma_async"),
        "older_products": kernel.asm["ptx"].count("mma.sync"),
        "conversions": len(re.findall(r"cvt\.rn\.f32\.[su]32", kernel.asm["ptx"])),
    }


def told_of_products() -> list[dict[str, int]]:
    return [{"architecture": case[-1], **facts_of_product(compiled_product(*case))} for case in CASES]


# Kernels of a chain, and what they do before they wait.

CHAIN_TYPES = {
    "x": "*bf16", "matrix": "*bf16", "bias": "*bf16", "y": "*bf16", "partial": "*fp32", "ended": "*i32",
    "residual": "*bf16", "weight": "*bf16", "output": "*bf16", "gate_up": "*bf16", "epsilon": "fp32",
}  # fmt: skip
CHAIN_COLUMNS, CHAIN_STEP, CHAIN_STAGES, CHAIN_WARPS = NARROW
PRODUCT = {
    "x_scales": None, "scales": None, "STEP": CHAIN_STEP, "COLUMNS": CHAIN_COLUMNS, "ROWS": 16, "IS_SHARED": True,
    "AT_ONCE": 8, "HAS_BIAS": False, "OPERAND": tl.bfloat16, "AHEAD": 2,
}  # fmt: skip
NO_CODES = {"codes": None, "scales": None, "MOST": LARGEST, "LEAST": SMALLEST}
CHAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "product": (row_product_kernel, PRODUCT),
    "norm": (kernels.rms_norm_kernel, {"WIDTH": 4096, "COLUMNS": 4096, "ADD": True, **NO_CODES}),
    "silu": (kernels.silu_multiply_kernel, {"WIDTH": 14336, "COLUMNS": 2048, **NO_CODES}),
}


def facts_of_chain(kernel: Any, constants: dict[str, Any], is_programmatic: bool) -> dict[str, int]:
    made = compile_kernel(
        kernel,
        CHAIN_TYPES,
        {**constants, "PROGRAMMATIC": is_programmatic},
        num_warps=CHAIN_WARPS,
        num_stages=CHAIN_STAGES,
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


@without_machine_code()
def told_of_launches() -> dict[str, dict[str, dict[str, int]]]:
    return {
        how: {name: facts_of_chain(*case, is_programmatic) for name, case in CHAIN.items()}
        for how, is_programmatic in (("chained", True), ("alone", False))
    }


if __name__ == "__main__":
    told = {
        "attention": told_of_attention(),
        "lora": told_of_adapters(),
        "ops": told_of_operations(),
        "quantised": told_of_products(),
        "launches": told_of_launches(),
    }
    print(json.dumps(told))
