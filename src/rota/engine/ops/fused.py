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
from rota.engine.ops.reference import Operations
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
            normed, total = with_adapters.add_rms_norm(x, residual, weight, epsilon, rounded=rounded)
            return carry(normed, rounded), total
        assert residual.is_contiguous()
        output = x if x.is_contiguous() else torch.empty_like(residual)
        return self._norm(x, residual, weight, output, epsilon, adds=True), residual

    def silu_multiply(self, gate_up: Output) -> Tensor:
        if isinstance(gate_up, DeferredLora):
            return with_adapters.silu_multiply(gate_up)
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
        self,
        qkv: Output,
        rotary: Tensor,
        step: DeviceStep,
        cache: LayerCache,
        norms: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
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
            HEADS_TILE=heads_tile, NORMS=norms is not None, **programmatic(query), num_warps=4,
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


def _parts(rounded: Scaled | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rounded is None else (rounded.codes, rounded.scales)


def _row_shape(width: int) -> dict[str, int]:
    """A program holds a whole row in registers: some 16 numbers for each thread, more where a row is longer."""
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": min(16, max(1, columns // 512))}
