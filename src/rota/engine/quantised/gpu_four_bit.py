"""Products of a GPU by a matrix in four bits, x and the sums in 16 and 32 bits.

Few rows are multiplied by our kernel, which reads the four bits; for more rows the matrix is written out first. The
kernel knows groups of 32 inputs or a multiple of that, equally long, and zeros that are whole. Inputs in the order of
their importance are sorted once, and the columns of x in every product. Any other matrix is kept whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.model.linear import Projection, projection
from rota.engine.quantised.codes import Codes
from rota.engine.quantised.linear import FewBitsLinear, Product
from rota.engine.quantised.packing import pack_four_bits, step_of


class FourBitReference(Product):
    """The product on a CPU, for tests: each weight is rounded to x's precision, then multiplied in float32."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes

    @property
    def size_bytes(self) -> int:
        # As on a GPU: two codes to a byte, and a word for each group.
        return self._codes.codes.numel() // 2 + self._codes.scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.float() @ self._codes.weights().to(x.dtype).float().T
        return (y if bias is None else y.add_(bias)).to(x.dtype)


def four_bit_linear(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> Projection:
    """x Wᵀ + b with the matrix in four bits."""
    if codes.codes.device.type == "cpu":
        return FewBitsLinear(FourBitReference(codes), bias)
    step = step_of(codes)
    if step is None:
        return projection(codes.weights().to(dtype), bias)
    # Triton is not everywhere.
    from rota.engine.quantised.packed_product import PackedProduct, WrittenOutProduct

    order = None
    if not torch.equal(codes.groups, codes.groups.sort().values):
        order = codes.groups.argsort(stable=True)
        codes = in_order(codes, order)
    packed = pack_four_bits(codes, step)
    return FewBitsLinear(PackedProduct(packed, WrittenOutProduct(packed)), bias, order)


def in_order(codes: Codes, order: Tensor) -> Codes:
    """The same matrix with its inputs in another order."""
    return Codes(codes=codes.codes[:, order], scales=codes.scales, zeros=codes.zeros, groups=codes.groups[order])
