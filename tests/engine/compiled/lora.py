"""The kernels of adapters, as they are compiled for Llama-8B."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.files.ranks import PAGE_RANK
from rota.engine.lora.triton_embed_head import COLUMNS, STAGES, STEP, WARPS, own_head_kernel
from rota.engine.lora.triton_ops import DECODE, LoraTuning, expand_kernel, shrink_kernel
from tests.engine.kernels_compiled import compile_kernel, resources

# A step's inputs may lie anywhere.
ANYWHERE = ("ranks", "table", "order", "tile_slots", "tile_starts", "tile_counts")
TYPES = {
    **dict.fromkeys((*ANYWHERE, "heads"), "*i32"),
    **dict.fromkeys(("x", "a", "b", "y", "logits", "matrices"), "*bf16"),
    "partial": "*fp32",
    "gain_bias": "*fp32",
}
# Llama-8B's qkv, slots of rank 64.
SITE = {"PARTS": 3, "MAX_RANK": 64, "OPERAND": tl.bfloat16}
# Two numbers for each of the 43,008 outputs of its 32 layers.
SLOT = 32 * 2 * 43_008
HEAD = {"MATRIX": 128_256 * 4096, "INPUTS": 4096, "OUTPUTS": 128_256, "TILE": DECODE_TILE, "OPERAND": tl.bfloat16}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], page: int, warps: int, stages: int) -> Any:
    constants = {**SITE, **constants, "PAGE": page, **({} if page else {"table": None})}
    return compile_kernel(kernel, types, constants, ANYWHERE, num_warps=warps, num_stages=stages)


def shrink(tuning: LoraTuning, tile: int, page: int) -> Any:
    shapes = tuning.shrink
    constants = {"INPUTS": 4096, "TILE": tile, "ROWS": shapes.rows, "SHARE": shapes.share, "STEP": shapes.step}
    return compiled(shrink_kernel, TYPES, constants, page, shapes.warps, shapes.stages)


def expand(tuning: LoraTuning, tile: int, by_token: bool, page: int, apply_gain_bias: int = 0) -> Any:
    shapes = tuning.expand
    constants = {
        "FIRST": 4096, "SECOND": 1024, "THIRD": 1024, "SHARES": 1 if by_token else 8, "TILE": tile,
        "COLUMNS": shapes.columns, "RANKS": shapes.ranks, "BY_TOKEN": by_token, "GAIN_BIAS": apply_gain_bias,
        **({} if apply_gain_bias else {"gain_bias": None}),
    }  # fmt: skip
    types = {**TYPES, "shrunk": "*bf16" if by_token else "*fp32"}
    return compiled(expand_kernel, types, constants, page, shapes.warps, 1)


def facts(kernel: Any) -> dict[str, int]:
    ptx = kernel.asm["ptx"]
    return {
        **resources(kernel),
        "pointers": len(re.findall(r"\.param \.u64 \.ptr", ptx)),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4|cp\.async\.cg", ptx)),
    }


def pair(make: Callable[[int], Any]) -> list[dict[str, int]]:
    """A kernel's facts without pages and with them."""
    return [facts(make(page)) for page in (0, PAGE_RANK)]


def own_head() -> dict[str, int]:
    constants = {**HEAD, "COLUMNS": COLUMNS, "STEP": STEP}
    return resources(
        compile_kernel(own_head_kernel, TYPES, constants, (*ANYWHERE, "heads"), num_warps=WARPS, num_stages=STAGES)
    )


def told() -> dict[str, Any]:
    expands = [partial(expand, DECODE, DECODE_TILE, by_token) for by_token in (False, True)]
    return {
        "without pages and with them": [pair(one) for one in (partial(shrink, DECODE, DECODE_TILE), *expands)],
        "without trims and with them": [
            [facts(one(page, apply_gain_bias)) for apply_gain_bias in (0, SLOT)]
            for one in expands
            for page in (0, PAGE_RANK)
        ],
        "own head": own_head(),
    }
