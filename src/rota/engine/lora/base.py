"""What an adapter's file is relative to: rows, biases and norms of the model, in whatever form it has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from rota.core.adapter import Extra
from rota.engine.model.linear import Matrix, Projection
from rota.engine.model.sites import SITES, SiteShape
from rota.engine.weights.load import LayerWeights

# ── base ends ───────────────────────────────────────────────────────────────────────────────────────────────────────
# BaseEmbedHead tells what an adapter's ends are relative to: rows of the model's embedding and head, and their norms.

# Unit vectors in one product: each gives a number for every token. And rows in float32 at a time.
COLUMNS_AT_ONCE = 64
TOKENS_AT_ONCE = 2048


class BaseEmbedHead:
    """The ends below a bank's ends; asked when an adapter is read."""

    def __init__(self, extras: Extra, embedding: Tensor, head: Projection, matrices: int = 0) -> None:
        self.extras = extras  # the ends that slots have
        self.matrices = matrices  # places for matrices of adapters' own
        self.matrix_bytes = embedding.nbytes
        self._embedding = embedding
        self._head = head

    @property
    def has_plain_head(self) -> bool:
        """Are the head's rows those of the model's folder?"""
        return isinstance(self._head, Matrix)

    @torch.inference_mode()
    def embedding_rows(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden] float32 on the host."""
        return self._embedding[list(tokens)].float().cpu()

    @torch.inference_mode()
    def head_rows(self, tokens: Sequence[int]) -> Tensor:
        """The same of the head; `tokens` count from this rank's first. A head in few bits is asked by its product."""
        if isinstance(self._head, Matrix):
            return self._head.weight[list(tokens)].float().cpu()
        return torch.cat([columns[:, list(tokens)] for columns in self._columns()]).T.float().cpu()

    @torch.inference_mode()
    def embedding_against(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Of each column of the embedding: its square [hidden], and its products with a's columns [rank, hidden]."""
        squares, products = torch.zeros(()), torch.zeros(())
        for rows, part in zip(self._embedding.split(TOKENS_AT_ONCE), a.split(TOKENS_AT_ONCE), strict=True):
            own = rows.float()
            squares = squares + own.square().sum(0).cpu()
            products = products + (part.to(own.device).float().T @ own).cpu()
        return squares, products

    @torch.inference_mode()
    def head_against(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of the head: its square [tokens], and its products with a's rows [rank, tokens]."""
        if isinstance(self._head, Matrix):
            rows, a = self._head.weight.split(TOKENS_AT_ONCE), a.to(self._embedding.device).float()
            products = torch.cat([a @ part.float().T for part in rows], dim=1)
            return torch.cat([part.float().square().sum(1) for part in rows]).cpu(), products.cpu()
        squares, products = torch.zeros(()), torch.zeros(())
        for columns, part in zip(self._columns(), a.split(COLUMNS_AT_ONCE, dim=1), strict=True):
            own = columns.float()
            squares = squares + own.square().sum(0).cpu()
            products = products + (part.to(own.device).float() @ own).cpu()
        return squares, products

    def _columns(self) -> Iterator[Tensor]:
        """The columns of a head that no one can look at, as its products with unit vectors: [some, tokens]."""
        units = torch.eye(self._embedding.shape[1], dtype=self._embedding.dtype, device=self._embedding.device)
        for some in units.split(COLUMNS_AT_ONCE):
            yield self._head(some)


# ── base matrices ───────────────────────────────────────────────────────────────────────────────────────────────────
# BaseMatrices tells what an adapter's file is relative to: rows and biases of the model, in whatever form they lie.
#
# A matrix in few bits, or in an order of its own, is asked through its product: the product of nought is its bias,
# and the products of unit vectors are its columns. So an adapter is folded with the numbers that the model computes
# with, and not with what rounding would make of the adapter's own.

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
