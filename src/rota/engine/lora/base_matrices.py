"""BaseMatrices tells what an adapter's file is relative to: rows and biases of the model, in whatever form they lie.

A matrix in few bits, or in an order of its own, is asked through its product: the product of nought is its bias, and
the products of unit vectors are its columns. So an adapter is folded with the numbers that the model computes with, and
not with what rounding would make of the adapter's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rota.engine.model.linear import Matrix, Projection
from rota.engine.model.sites import SITES, SiteShape
from rota.engine.weights.load import LayerWeights

# Rows of a matrix in float32, and unit vectors in one product: some tens of megabytes for an 8B.
ROWS_AT_ONCE = 2048
UNITS_AT_ONCE = 256


class BaseMatrices:
    """Asked inside `alone`. What was worked out for a site is kept, a number for each output."""

    def __init__(
        self, layers: Sequence[LayerWeights], shapes: Sequence[SiteShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self._dtype = dtype
        self._layers = [dict(zip(SITES, (one.qkv, one.output, one.gate_up, one.down), strict=True)) for one in layers]
        self._inputs = {shape.name: shape.inputs for shape in shapes}
        self._squares: dict[tuple[int, str], Tensor] = {}
        self._lock = threading.Lock()
        # Beside the steps, not between them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time, on a stream of its own where there are streams."""
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    @torch.inference_mode()
    def bias(self, layer: int, site: str) -> Tensor:
        """[outputs] float32; nought where the model has none, and on ranks that do not add it."""
        return self._product(layer, site, torch.zeros(1, self._inputs[site]))[0]

    @torch.inference_mode()
    def products(self, layer: int, site: str, rows: Tensor) -> Tensor:
        """rows Wᵀ, [rows, outputs] float32, without the bias."""
        matrix, rows = self._layers[layer][site], rows.to(self.device).float()
        if isinstance(matrix, Matrix):
            return torch.cat([rows @ part.float().T for part in matrix.weight.split(ROWS_AT_ONCE)], dim=1)
        return self._over_columns(layer, site, lambda columns, where: rows[:, where] @ columns)

    @torch.inference_mode()
    def squares(self, layer: int, site: str) -> Tensor:
        """|row|² of every row of W, [outputs] float32."""
        if (layer, site) not in self._squares:
            self._squares[layer, site] = self._squared(self._layers[layer][site], layer, site)
        return self._squares[layer, site]

    def _squared(self, matrix: Projection, layer: int, site: str) -> Tensor:
        if isinstance(matrix, Matrix):
            return torch.cat([part.float().square().sum(dim=1) for part in matrix.weight.split(ROWS_AT_ONCE)])
        return self._over_columns(layer, site, lambda columns, _: columns.square().sum(dim=0))

    def _over_columns(self, layer: int, site: str, take: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """The sum of what is taken from W's columns, [some, outputs], some at a time."""
        inputs, bias, total = self._inputs[site], self.bias(layer, site), torch.zeros((), device=self.device)
        for first in range(0, inputs, UNITS_AT_ONCE):
            where = slice(first, min(inputs, first + UNITS_AT_ONCE))
            units = torch.zeros(where.stop - first, inputs)
            units[:, where].fill_diagonal_(1.0)
            total = total + take(self._product(layer, site, units) - bias, where)
        return total

    def _product(self, layer: int, site: str, rows: Tensor) -> Tensor:
        return self._layers[layer][site](rows.to(self.device, self._dtype)).float()
