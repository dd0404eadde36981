"""Launches of operations that take an open product: they add the adapters' part, then do what their twins do.

Twins are in `ops/fused.py`. Launches depend on shapes only, so a CUDA graph serves any assignment of tokens to slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import DeferredLora
from rota.engine.ops.with_adapters_kernels import add_rms_norm_kernel, rotate_and_store_kernel, silu_multiply_kernel
from rota.engine.programmatic_launch import programmatic
from rota.engine.quantised.codes import LARGEST, SMALLEST, Scaled
from rota.engine.step.device_step import DeviceStep

# The smallest number of rows a matrix instruction takes.
SMALLEST_DOT = 16
SMALL_TILE = 32
# Slots of up to so many ranks are read whole, before a rank is known. Only a fused LoRA A has zeros beyond a rank.
SMALL_RANK = 16
_OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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


def silu_multiply(product: DeferredLora, shapes: Shapes | None = None) -> Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half."""
    shapes = shapes or (SHAPES if product.batch.tile_size <= SMALL_TILE else LARGE_TILES)
    y, width = product.y, product.y.shape[1] // 2
    output = torch.empty(len(y), width, dtype=y.dtype, device=y.device)
    columns = min(shapes.silu_columns, max(SMALLEST_DOT, triton.next_power_of_2(width)))
    silu_multiply_kernel[(triton.cdiv(width, columns), _tiles(product))](
        *_tiled(product), output, *_numbers(product), WIDTH=width, COLUMNS=columns, **_constants(product),
        num_warps=shapes.silu_warps, num_stages=shapes.stages,
    )  # fmt: skip
    return output


def rotate_and_store(
    product: DeferredLora,
    rotary: Tensor,
    step: DeviceStep,
    cache: LayerCache,
    norms: tuple[Tensor, Tensor, float] | None,
    shapes: Shapes = SHAPES,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the cache, return the queries [tokens, heads, head_dim]."""
    keys, y = cache.keys, product.y
    assert keys.stride() == cache.values.stride()
    assert keys.stride(3) == 1
    assert rotary.is_contiguous()
    _, kv_heads, block_size, head_dim = keys.shape
    heads = y.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(len(y), heads, head_dim, dtype=y.dtype, device=y.device)
    query_norm, key_norm, epsilon = norms if norms is not None else (y, y, 0.0)
    rotate_and_store_kernel[(heads + 2 * kv_heads, _tiles(product))](
        *_tiled(product), rotary, step.positions, step.addresses, query, keys, cache.values, cache.scales,
        query_norm, key_norm, epsilon, *_numbers(product), *keys.stride()[:3], HEADS=heads, KV_HEADS=kv_heads,
        HALF=head_dim // 2, HALF_TILE=max(SMALLEST_DOT, triton.next_power_of_2(head_dim // 2)),
        BLOCK_SIZE=block_size, NORMS=norms is not None, **_constants(product), num_warps=shapes.head_warps,
        num_stages=shapes.stages,
    )  # fmt: skip
    return query


def add_rms_norm(
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
    add_rms_norm_kernel[(len(y),)](
        y, factors.b, factors.ranks, _gain_bias(product), batch.order, batch.token_slots, shrunk, residual, weight,
        output, None if rounded is None else rounded.codes, None if rounded is None else rounded.scales, epsilon,
        len(y), len(factors.ranks), y.stride(0), shrunk.stride(-2), WIDTH=width, COLUMNS=columns,
        MAX_RANK=factors.max_rank, SHARES=1 if by_token else len(shrunk), RANKS=shapes.norm_ranks, BY_TOKEN=by_token,
        IS_SMALL=by_token and factors.max_rank <= SMALL_RANK, GAIN_BIAS=_gain_bias_stride(product), MOST=LARGEST,
        LEAST=SMALLEST, **_programmatic(product),
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
        "RANKS": SMALLEST_DOT, "OPERAND": _operand(factors.b), "BY_TOKEN": by_token, **_programmatic(product),
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


def _operand(factor: Tensor) -> tl.dtype:
    # The interpreter stores bfloat16 as integers and multiplies the integers; only float32 is right there.
    return tl.float32 if triton.knobs.runtime.interpret else _OPERANDS[factor.dtype]
