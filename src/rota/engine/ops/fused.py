"""The small operations between matrix products, one Triton launch each; twins of `ops/reference.py`.

All of them are bound by memory, so each reads its inputs once, computes in float32 and rounds once, at the end.
Launches depend on shapes only, so a CUDA graph serves any assignment of tokens to slots. An open product gets its
adapters' part meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.lora.triton_ops import SMALLEST_DOT, operand
from rota.engine.ops import with_adapters_kernels as adding
from rota.engine.ops.kernels import rms_norm_kernel, rotate_and_store_kernel, silu_multiply_kernel
from rota.engine.ops.reference import HeadNorms, Operations
from rota.engine.programmatic_launch import programmatic
from rota.engine.quantised.codes import LARGEST, SMALLEST, Scaled, carry
from rota.engine.step.device_step import DeviceStep

# 128 threads with 16 bytes of bfloat16 each, twice.
SILU_COLUMNS = 2048
# A third of Llama-8B's 48 heads: then 64 decodes make more programs than an H200 has processors.
HEADS_PER_PROGRAM = 16
# Inputs of a word, whose order codes have.
WORD = 16


class FusedOperations(Operations):
    """Of a model in eight-bit floats norms and silu also write their rows in eight bits, which the rows carry.

    That saves the launch that rounds x before a product, at three of a layer's four (attention writes what the fourth
    reads): 0.16 to 0.26 ms of a step on an H200 (decision 0023). Silu of an open product does not round: its programs
    see a part of a row.
    """

    def __init__(self, rounds: bool = False) -> None:
        self._rounds = rounds

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._norm(x, x, weight, output, epsilon, adds=False)

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The sum overwrites residual, the norm overwrites x if x is contiguous."""
        if isinstance(x, DeferredLora):
            rounded = self._room(residual)
            normed, total = add_rms_norm_open(x, residual, weight, epsilon, rounded=rounded)
            return carry(normed, rounded), total
        assert residual.is_contiguous()
        output = x if x.is_contiguous() else torch.empty_like(residual)
        return self._norm(x, residual, weight, output, epsilon, adds=True), residual

    def silu_multiply(self, gate_up: Output) -> Tensor:
        if isinstance(gate_up, DeferredLora):
            return silu_multiply_open(gate_up)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        rounded = self._room(output)
        shape = {"COLUMNS": min(SILU_COLUMNS, triton.next_power_of_2(width)), "num_warps": 4}
        if rounded is not None:
            shape = _row_shape(width)
        grid = (tokens, triton.cdiv(width, shape["COLUMNS"]))
        silu_multiply_kernel[grid](
            gate_up, output, *_parts(rounded), gate_up.stride(0), WIDTH=width, MOST=LARGEST, LEAST=SMALLEST, **shape,
            **programmatic(output),
        )  # fmt: skip
        return carry(output, rounded)

    def rotate_and_store(
        self, qkv: Output, rotary: Tensor, step: DeviceStep, cache: LayerCache, norms: HeadNorms | None
    ) -> Tensor:
        if isinstance(qkv, DeferredLora):
            return rotate_and_store_open(qkv, rotary, step, cache, norms)
        assert qkv.stride(1) == 1
        query, tensors, shape, all_heads = _rotation(qkv, rotary, step, cache, norms)
        heads_tile = min(HEADS_PER_PROGRAM, triton.next_power_of_2(all_heads))
        rotate_and_store_kernel[(len(qkv), triton.cdiv(all_heads, heads_tile))](
            qkv, *tensors, qkv.stride(0), *cache.keys.stride()[:3], **shape,
            HALF_TILE=triton.next_power_of_2(shape["HALF"]), HEADS_TILE=heads_tile, **programmatic(query), num_warps=4,
        )  # fmt: skip
        return query

    def _norm(self, x: Tensor, residual: Tensor, weight: Tensor, output: Tensor, epsilon: float, adds: bool) -> Tensor:
        rounded, (tokens, width) = self._room(output), x.shape
        rms_norm_kernel[(tokens,)](
            x, residual, weight, output, *_parts(rounded), epsilon, x.stride(0), WIDTH=width, ADD=adds, MOST=LARGEST,
            LEAST=SMALLEST, **_row_shape(width), **programmatic(output),
        )  # fmt: skip
        return carry(output, rounded)

    def _room(self, rows: Tensor) -> Scaled | None:
        """For rows in eight bits, if they are wanted and no word is broken."""
        if not self._rounds or rows.shape[1] % WORD:
            return None
        codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        return Scaled(codes, torch.empty(len(rows), dtype=torch.float32, device=rows.device))


def _rotation(
    qkv: Tensor, rotary: Tensor, step: DeviceStep, cache: LayerCache, norms: HeadNorms | None
) -> tuple[Tensor, tuple[Tensor | float | None, ...], dict[str, int], int]:
    """Room for the queries, what both kernels read and write, their constants, and how many heads there are in all."""
    keys = cache.keys
    assert keys.stride() == cache.values.stride()
    assert keys.stride(3) == 1
    assert rotary.is_contiguous()
    _, kv_heads, block_size, head_dim = keys.shape
    all_heads = qkv.shape[1] // head_dim
    heads = all_heads - 2 * kv_heads
    query = torch.empty(len(qkv), heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    own = (query, keys, cache.values, cache.scales, *(norms or (qkv, qkv, 0.0)))
    shape = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "BLOCK_SIZE": block_size,
        "NORMS": norms is not None,
    }  # fmt: skip
    return query, (rotary, step.positions, step.addresses, *own), shape, all_heads


def _parts(rounded: Scaled | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rounded is None else (rounded.codes, rounded.scales)


def _row_shape(width: int) -> dict[str, int]:
    """A program holds a whole row in registers: some 16 numbers for each thread, more where a row is longer."""
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": min(16, max(1, columns // 512))}


# ── open products ───────────────────────────────────────────────────────────────────────────────────────────────────
# They add the adapters' part, then do what their twins above do.

SMALL_TILE = 32
# Slots of up to so many ranks are read whole, before a rank is known. Only a fused LoRA A has zeros beyond a rank.
SMALL_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes of the three kernels; `benchmarks/open_sites.py` compares some."""

    silu_columns: int = 128
    silu_warps: int = 4
    head_warps: int = 4
    norm_ranks: int = 8  # ranks of B that a program of the norm has on their way together
    norm_columns: int = 8  # columns of a row for each thread
    stages: int = 1  # of the loops over ranks; one rank-16 adapter is one iteration


SHAPES = Shapes()
# Of tiles that hold many tokens: two sums of [tokens, columns] are in a program's registers.
LARGE_TILES = Shapes(silu_columns=64)


def silu_multiply_open(product: DeferredLora, shapes: Shapes | None = None) -> Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half."""
    shapes = shapes or (SHAPES if product.batch.tile_size <= SMALL_TILE else LARGE_TILES)
    y, width = product.y, product.y.shape[1] // 2
    output = torch.empty(len(y), width, dtype=y.dtype, device=y.device)
    columns = min(shapes.silu_columns, max(SMALLEST_DOT, triton.next_power_of_2(width)))
    adding.silu_multiply_kernel[(triton.cdiv(width, columns), _tiles(product))](
        *_tiled(product), output, *_numbers(product), WIDTH=width, COLUMNS=columns, **_constants(product),
        num_warps=shapes.silu_warps, num_stages=shapes.stages,
    )  # fmt: skip
    return output


def rotate_and_store_open(
    product: DeferredLora,
    rotary: Tensor,
    step: DeviceStep,
    cache: LayerCache,
    norms: HeadNorms | None,
    shapes: Shapes = SHAPES,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the cache, return the queries [tokens, heads, head_dim]."""
    query, tensors, shape, all_heads = _rotation(product.y, rotary, step, cache, norms)
    adding.rotate_and_store_kernel[(all_heads, _tiles(product))](
        *_tiled(product), *tensors, *_numbers(product), *cache.keys.stride()[:3], **shape,
        HALF_TILE=max(SMALLEST_DOT, triton.next_power_of_2(shape["HALF"])), **_constants(product),
        num_warps=shapes.head_warps, num_stages=shapes.stages,
    )  # fmt: skip
    return query


def add_rms_norm_open(
    product: DeferredLora,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    shapes: Shapes = SHAPES,
    rounded: Scaled | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(product + residual), product + residual); the sum overwrites residual, and the norm is written twice if
    there is room for it in eight bits."""
    y, batch, factors, shrunk = product.y, product.batch, product.factors, product.shrunk
    assert residual.is_contiguous()
    output, width = torch.empty_like(residual), y.shape[1]
    columns, by_token = triton.next_power_of_2(width), shrunk.dim() == 2
    adding.add_rms_norm_kernel[(len(y),)](
        y, factors.b, factors.ranks, _gain_bias(product), batch.order, batch.token_slots, shrunk, residual, weight,
        output, *_parts(rounded), epsilon, len(y), len(factors.ranks), y.stride(0), shrunk.stride(-2), WIDTH=width,
        COLUMNS=columns, MAX_RANK=factors.max_rank, SHARES=1 if by_token else len(shrunk), RANKS=shapes.norm_ranks,
        BY_TOKEN=by_token, IS_SMALL=by_token and factors.max_rank <= SMALL_RANK, GAIN_BIAS=_gain_bias_stride(product),
        MOST=LARGEST, LEAST=SMALLEST, **_programmatic(product),
        num_warps=min(16, max(1, columns // (32 * shapes.norm_columns))), num_stages=shapes.stages,
    )  # fmt: skip
    return output, residual


def _tiles(product: DeferredLora) -> int:
    """Tiles of adapters' tokens, and behind them tiles of neighbours for the base model's."""
    batch = product.batch
    return len(batch.tile_slots) + triton.cdiv(len(product.y), batch.tile_size)


def _tiled(product: DeferredLora) -> tuple[Tensor | None, ...]:
    factors, batch = product.factors, product.batch
    assert product.y.stride(1) == 1
    assert factors.b.is_contiguous()
    assert product.y.dtype == factors.b.dtype
    tiles = (batch.tile_slots, batch.tile_starts, batch.tile_counts)
    gain_bias, order = _gain_bias(product), batch.order
    return product.y, factors.b, factors.ranks, gain_bias, order, batch.token_slots, *tiles, product.shrunk


def _numbers(product: DeferredLora) -> tuple[int, ...]:
    y, shrunk = product.y, product.shrunk
    return len(y), len(product.batch.tile_slots), len(product.factors.ranks), y.stride(0), shrunk.stride(-2)


def _constants(product: DeferredLora) -> dict[str, Any]:
    factors, shrunk = product.factors, product.shrunk
    by_token = shrunk.dim() == 2
    return {
        "MAX_RANK": factors.max_rank, "SHARES": 1 if by_token else len(shrunk), "TILE": product.batch.tile_size,
        "RANKS": SMALLEST_DOT, "OPERAND": operand(factors.b), "BY_TOKEN": by_token, **_programmatic(product),
        "GAIN_BIAS": _gain_bias_stride(product),
    }  # fmt: skip


def _programmatic(product: DeferredLora) -> dict[str, bool]:
    """Where x A.T does not come with the product, two kernels run before this one, and it cannot wait inside."""
    return programmatic(product.y) if product.shrunk.dim() == 2 else {"PROGRAMMATIC": False}


def _gain_bias(product: DeferredLora) -> Tensor | None:
    gain_bias = product.factors.gain_bias
    return None if gain_bias is None else gain_bias.numbers


def _gain_bias_stride(product: DeferredLora) -> int:
    """Numbers from a slot's gains and biases to the next slot's; 0: there are none."""
    gain_bias = _gain_bias(product)
    return 0 if gain_bias is None else gain_bias.stride(0)
