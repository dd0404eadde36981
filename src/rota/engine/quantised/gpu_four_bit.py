"""Products of a GPU by a matrix in four bits: weights take the precision of x just before they are multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.quantised.codes import Codes


def product_reference(x: Tensor, codes: Codes) -> Tensor:
    """[rows, outputs] float32: each weight is rounded to x's precision, then multiplied in float32."""
    return x.float() @ codes.weights().to(x.dtype).float().T


class GpuFourBitLinear:
    """x Wᵀ + b with the matrix in four bits; on a CPU the reference, for tests."""

    widened = None
    keeps_weight = False

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._codes = codes
        self._bias = bias
        self._dtype = dtype

    @property
    def size_bytes(self) -> int:
        # As on a GPU: two codes to a byte, and a scale and a zero for each group.
        scales = 2 * self._codes.scales.nbytes
        return self._codes.codes.numel() // 2 + scales + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y = product_reference(x, self._codes)
        return (y if self._bias is None else y.add_(self._bias)).to(x.dtype)
