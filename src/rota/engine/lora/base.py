"""What an adapter's file is relative to: rows, biases and norms of the model, in whatever form it has them.

A matrix in few bits, or in an order of its own, is asked through its product: the product of nought is its bias, and
the products of unit vectors are its columns. So an adapter is folded with the numbers that the model computes with, and
not with what rounding would make of the adapter's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from rota.core.adapter import Extra
from rota.engine.model.linear import Matrix, Projection
from rota.engine.model.sites import SITES, SiteShape
from rota.engine.weights.load import LayerWeights

# Rows of a matrix in float32, and unit vectors in one product: some tens of megabytes for an 8B.
ROWS_AT_ONCE = 2048
UNITS_AT_ONCE = 256


class BaseMatrix:
    """A matrix of the model, [outputs, inputs]. Its squares are worked out once: a number for each output."""

    def __init__(self, matrix: Projection, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._matrix, self._inputs, self._dtype, self._device = matrix, inputs, dtype, device

    @property
    def is_plain(self) -> bool:
        """Are the rows those of the model's folder?"""
        return isinstance(self._matrix, Matrix)

    @torch.inference_mode()
    def bias(self) -> Tensor:
        """[outputs] float32; nought where the model has none, and on ranks that do not add it."""
        return self._product(torch.zeros(1, self._inputs))[0]

    @torch.inference_mode()
    def rows(self, numbers: Sequence[int]) -> Tensor:
        """[numbers, inputs] float32 on the host."""
        if isinstance(self._matrix, Matrix):
            return self._matrix.weight[list(numbers)].float().cpu()
        return torch.cat([columns[:, list(numbers)] for _, columns in self._columns()]).T.cpu()

    @torch.inference_mode()
    def products(self, rows: Tensor) -> Tensor:
        """rows Wᵀ, [rows, outputs] float32, without the bias."""
        rows = rows.to(self._device).float()
        if isinstance(self._matrix, Matrix):
            return torch.cat([rows @ part.float().T for part in self._matrix.weight.split(ROWS_AT_ONCE)], dim=1)
        return sum((rows[:, where] @ columns for where, columns in self._columns()), self._zero())

    @cached_property
    @torch.inference_mode()
    def squares(self) -> Tensor:
        """|row|² of every row, [outputs] float32."""
        if isinstance(self._matrix, Matrix):
            return torch.cat([part.float().square().sum(dim=1) for part in self._matrix.weight.split(ROWS_AT_ONCE)])
        return sum((columns.square().sum(dim=0) for _, columns in self._columns()), self._zero())

    def _columns(self) -> Iterator[tuple[slice, Tensor]]:
        """The columns of a matrix that no one can look at, [some, outputs] float32, some at a time."""
        bias = self.bias()
        for first in range(0, self._inputs, UNITS_AT_ONCE):
            where = slice(first, min(self._inputs, first + UNITS_AT_ONCE))
            units = torch.zeros(where.stop - first, self._inputs)
            units[:, where].fill_diagonal_(1.0)
            yield where, self._product(units) - bias

    def _product(self, rows: Tensor) -> Tensor:
        return self._matrix(rows.to(self._device, self._dtype)).float()

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._device)


class BaseEmbedHead:
    """The ends below a bank's ends; asked when an adapter is read."""

    def __init__(self, extras: Extra, embedding: Tensor, head: Projection, matrices: int = 0) -> None:
        self.extras = extras  # the ends that slots have
        self.matrices = matrices  # places for matrices of adapters' own
        self.matrix_bytes = embedding.nbytes
        self._embedding = embedding
        # Its rows count from this rank's first token.
        self.head = BaseMatrix(head, embedding.shape[1], embedding.dtype, embedding.device)

    @torch.inference_mode()
    def embedding_rows(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden] float32 on the host."""
        return self._embedding[list(tokens)].float().cpu()

    @torch.inference_mode()
    def embedding_against(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Of each column of the embedding: its square [hidden], and its products with a's columns [rank, hidden]."""
        squares, products = torch.zeros(()), torch.zeros(())
        for rows, part in zip(self._embedding.split(ROWS_AT_ONCE), a.split(ROWS_AT_ONCE), strict=True):
            own = rows.float()
            squares = squares + own.square().sum(0).cpu()
            products = products + (part.to(own.device).float().T @ own).cpu()
        return squares, products


class BaseMatrices:
    """The matrices of all layers, by layer and site; asked inside `alone`."""

    def __init__(
        self, layers: Sequence[LayerWeights], shapes: Sequence[SiteShape], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        inputs = {shape.name: shape.inputs for shape in shapes}
        self.at = {
            (number, site): BaseMatrix(matrix, inputs[site], dtype, device)
            for number, one in enumerate(layers)
            for site, matrix in zip(SITES, (one.qkv, one.output, one.gate_up, one.down), strict=True)
        }
        self._lock = threading.Lock()
        # Beside the steps, not between them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One thread at a time, on a stream of its own where there are streams."""
        with self._lock, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
