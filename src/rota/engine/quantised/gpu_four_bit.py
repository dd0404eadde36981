"""Products of a GPU by a matrix in four bits, x and the sums in 16 and 32 bits.

Few rows are multiplied by our kernel, which reads the four bits; for more rows the matrix is written out first. The
kernel knows groups of 32 inputs or a multiple of that, equally long, and zeros that are whole. Inputs in the order of
their importance are sorted once, and the columns of x in every product. Any other matrix is kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.quantised.codes import Codes
from rota.engine.quantised.linear import FewBitsLinear, Product
from rota.engine.quantised.packing import pack_four_bits, step_of


class FourBitReference:
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

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:
        """There is one way."""


class WholeProduct:
    """The product by a matrix that is in four bits no more."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self._weight, bias)

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:
        """There is one way."""


class GpuFourBitLinear(FewBitsLinear):
    """x Wᵀ + b with the matrix in four bits."""

    def __init__(self, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._order: Tensor | None = None  # of the inputs, if they have to be sorted
        if codes.codes.device.type == "cpu":
            super().__init__(FourBitReference(codes), bias)
        elif (step := step_of(codes)) is None:
            super().__init__(WholeProduct(codes.weights().to(dtype)), bias)
        else:
            if not torch.equal(codes.groups, codes.groups.sort().values):
                self._order = codes.groups.argsort(stable=True)
            super().__init__(_packed_product(in_order(codes, self._order), step), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x if self._order is None else x.index_select(1, self._order))


def in_order(codes: Codes, order: Tensor | None) -> Codes:
    """The same matrix with its inputs in another order."""
    if order is None:
        return codes
    return Codes(
        codes=codes.codes[:, order], scales=codes.scales, zeros=codes.zeros, groups=codes.groups[order]
    )  # fmt: skip


def _packed_product(codes: Codes, step: int) -> Product:
    # Triton is not everywhere.
    from rota.engine.quantised.packed_product import PackedProduct, WrittenOutProduct

    packed = pack_four_bits(codes, step)
    return PackedProduct(packed, WrittenOutProduct(packed))
