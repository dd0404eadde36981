"""A FewBitsLinear is a projection by a matrix in few bits, whatever multiplies it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from rota.engine.model.linear import Projection


class Product(ABC):
    """A matrix in few bits, and a way to multiply by it."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:  # noqa: B027 - most have one way
        """Find the fastest way for products of one kind and shape, and these numbers of rows."""


class FewBitsLinear:
    """x Wᵀ + b; adapters' A never lie below such a matrix, since they keep the model's precision."""

    widened = None
    keeps_weight = False

    def __init__(self, product: Product, bias: Tensor | None, order: Tensor | None = None) -> None:
        """`order` is that of the matrix's inputs, if it is another than that of x."""
        self._product = product
        self._bias = bias
        self._order = order

    @property
    def size_bytes(self) -> int:
        return self._product.size_bytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x if self._order is None else x.index_select(1, self._order), self._bias)

    def tune(self, alike: Sequence[Projection], rows: Sequence[int]) -> None:
        products = [one._product for one in alike if isinstance(one, FewBitsLinear)]
        products[0].tune(products, rows)
