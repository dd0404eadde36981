"""The small operations between matrix products, one Triton launch each; twins of `ops/reference.py`.

All of them are bound by memory, so each reads its inputs once, computes in float32 and rounds once, at the end.
Launches depend on shapes only, so a CUDA graph can capture them. An open product gets its adapters' part meanwhile
(`ops/with_adapters.py`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.ops import with_adapters
from rota.engine.ops.kernels import rms_norm_kernel, rotate_and_store_kernel, silu_multiply_kernel
from rota.engine.programmatic_launch import programmatic
from rota.engine.step.device_step import DeviceStep

# 128 threads with 16 bytes of bfloat16 each, twice.
SILU_COLUMNS = 2048
# A third of Llama-8B's 48 heads: then 64 decodes make more programs than an H200 has processors.
HEADS_PER_PROGRAM = 16
# Whether norm and rotation load early what they need late: 0.04 to 0.2 ms of a step on an H200 (decision 0023).
EARLY_LOADS = True


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[tokens, width] -> the same shape, each token divided by its root mean square, times the weight."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, width = x.shape
    rms_norm_kernel[(tokens,)](
        x, x, weight, output, epsilon, x.stride(0), WIDTH=width, **_row_shape(width), ADD=False,
        EARLY=EARLY_LOADS, **programmatic(x),
    )  # fmt: skip
    return output


def add_rms_norm(x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); the sum overwrites residual, the norm overwrites x if x is contiguous."""
    if isinstance(x, DeferredLora):
        return with_adapters.add_rms_norm(x, residual, weight, epsilon)
    assert residual.is_contiguous()
    tokens, width = x.shape
    output = x if x.is_contiguous() else torch.empty_like(residual)
    rms_norm_kernel[(tokens,)](
        x, residual, weight, output, epsilon, x.stride(0), WIDTH=width, **_row_shape(width), ADD=True,
        EARLY=EARLY_LOADS, **programmatic(x),
    )  # fmt: skip
    return output, residual


def silu_multiply(gate_up: Output) -> Tensor:
    """[tokens, 2 * width] -> silu(first half) * second half."""
    if isinstance(gate_up, DeferredLora):
        return with_adapters.silu_multiply(gate_up)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    columns = min(SILU_COLUMNS, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, columns))
    silu_multiply_kernel[grid](
        gate_up, output, gate_up.stride(0), WIDTH=width, COLUMNS=columns, **programmatic(output), num_warps=4
    )
    return output


def rotate_and_store(
    qkv: Output,
    rotary: Tensor,
    step: DeviceStep,
    cache: LayerCache,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the cache, return the queries [tokens, heads, head_dim]."""
    if isinstance(qkv, DeferredLora):
        return with_adapters.rotate_and_store(qkv, rotary, step, cache, norms)
    keys = cache.keys
    assert keys.stride() == cache.values.stride()
    assert qkv.stride(1) == keys.stride(3) == 1
    assert rotary.is_contiguous()
    tokens = qkv.shape[0]
    _, kv_heads, block_size, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, epsilon = norms if norms is not None else (qkv, qkv, 0.0)
    heads_tile = min(HEADS_PER_PROGRAM, triton.next_power_of_2(heads + 2 * kv_heads))
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, heads_tile))
    rotate_and_store_kernel[grid](
        qkv, rotary, step.positions, step.addresses, query, keys, cache.values, cache.scales,
        query_norm, key_norm, epsilon, qkv.stride(0), *keys.stride()[:3], HEADS=heads, KV_HEADS=kv_heads,
        HALF=head_dim // 2, HALF_TILE=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size,
        HEADS_TILE=heads_tile, NORMS=norms is not None, EARLY=EARLY_LOADS, **programmatic(query), num_warps=4,
    )  # fmt: skip
    return query


def _row_shape(width: int) -> dict[str, int]:
    """A program holds a whole row in registers: some 16 numbers for each thread."""
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": min(16, max(1, columns // 512))}
