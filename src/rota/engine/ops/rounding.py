"""RoundingOperations are the fused operations of a model in eight-bit floats: rows leave them rounded too.

They save the launch that rounds x before a product, at three of a layer's four; attention writes what the fourth reads.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.ops import fused, with_adapters
from rota.engine.ops.kernels import rounding_rms_norm_kernel, rounding_silu_multiply_kernel
from rota.engine.programmatic_launch import programmatic
from rota.engine.quantised.codes import LARGEST, SMALLEST, Scaled, carry

# Whether models in eight-bit floats use these operations: 0.16 to 0.26 ms of a step on an H200 (decision 0023).
IS_ROUNDING = True
# Inputs of a word, whose order the codes have.
WORD = 16


class RoundingOperations:
    """Norms and silu round what they write; silu of an open product does not: its programs see a part of a row."""

    rotate_and_store = staticmethod(fused.rotate_and_store)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if not _rounds(x):
            return fused.rms_norm(x, weight, epsilon)
        return _normed(x, x, weight, torch.empty_like(x, memory_format=torch.contiguous_format), epsilon, adds=False)

    def add_rms_norm(self, x: Output, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum overwrites residual, the norm overwrites x if x is contiguous."""
        if not _rounds(residual):
            return fused.add_rms_norm(x, residual, weight, epsilon)
        if isinstance(x, DeferredLora):
            rounded = _room(residual)
            normed, total = with_adapters.add_rms_norm(x, residual, weight, epsilon, rounded=rounded)
            return carry(normed, rounded), total
        assert residual.is_contiguous()
        output = x if x.is_contiguous() else torch.empty_like(residual)
        return _normed(x, residual, weight, output, epsilon, adds=True), residual

    def silu_multiply(self, gate_up: Output) -> Tensor:
        if isinstance(gate_up, DeferredLora) or not _rounds(gate_up, 2):
            return fused.silu_multiply(gate_up)
        tokens, width = len(gate_up), gate_up.shape[1] // 2
        output = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        rounded = _room(output)
        rounding_silu_multiply_kernel[(tokens,)](
            gate_up, output, rounded.codes, rounded.scales, gate_up.stride(0), WIDTH=width, MOST=LARGEST,
            LEAST=SMALLEST, **_row_shape(width), **programmatic(output),
        )  # fmt: skip
        return carry(output, rounded)


def _normed(x: Tensor, residual: Tensor, weight: Tensor, output: Tensor, epsilon: float, adds: bool) -> Tensor:
    rounded, (tokens, width) = _room(output), x.shape
    rounding_rms_norm_kernel[(tokens,)](
        x, residual, weight, output, rounded.codes, rounded.scales, epsilon, x.stride(0), WIDTH=width, ADD=adds,
        MOST=LARGEST, LEAST=SMALLEST, **_row_shape(width), **programmatic(output),
    )  # fmt: skip
    return carry(output, rounded)


def _rounds(rows: Tensor, parts: int = 1) -> bool:
    return rows.shape[1] % (parts * WORD) == 0


def _room(rows: Tensor) -> Scaled:
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    return Scaled(codes, torch.empty(len(rows), dtype=torch.float32, device=rows.device))


def _row_shape(width: int) -> dict[str, int]:
    """A program holds a whole row in registers: some 16 numbers for each thread, more where a row is longer."""
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": min(16, max(1, columns // 512))}
