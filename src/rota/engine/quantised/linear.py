"""A FewBitsLinear is a projection by a matrix in few bits, whatever multiplies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rota.engine.model.linear import Projection


class Product(Protocol):
    """A matrix in few bits, and a way to multiply by it."""

    @property
    def size_bytes(self) -> int: ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        ...

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:
        """Find the fastest way for products of one shape and these numbers of rows."""
        ...


class FewBitsLinear:
    """x Wᵀ + b; adapters' A never lie below such a matrix, since they keep the model's precision."""

    widened = None
    keeps_weight = False

    def __init__(self, product: Product, bias: Tensor | None) -> None:
        self._product = product
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return self._product.size_bytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._bias)

    def tune(self, alike: Sequence[Projection], rows: Sequence[int]) -> None:
        products = [one._product for one in alike if isinstance(one, FewBitsLinear)]
        for kind in dict.fromkeys(map(type, products)):
            same = [one for one in products if type(one) is kind]
            same[0].tune(same, rows)
