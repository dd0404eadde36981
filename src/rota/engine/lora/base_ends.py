"""BaseEnds tells what an adapter's ends are relative to: rows of the model's embedding and head, and their norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rota.core.extras import Extra
from rota.engine.model.linear import Matrix, Projection

# Unit vectors in one product: each gives a number for every token. And rows in float32 at a time.
UNITS_AT_ONCE = 64
ROWS_AT_ONCE = 2048


class BaseEnds:
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
        for rows, part in zip(self._embedding.split(ROWS_AT_ONCE), a.split(ROWS_AT_ONCE), strict=True):
            own = rows.float()
            squares = squares + own.square().sum(0).cpu()
            products = products + (part.to(own.device).float().T @ own).cpu()
        return squares, products

    @torch.inference_mode()
    def head_against(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of the head: its square [tokens], and its products with a's rows [rank, tokens]."""
        if isinstance(self._head, Matrix):
            rows, a = self._head.weight.split(ROWS_AT_ONCE), a.to(self._embedding.device).float()
            products = torch.cat([a @ part.float().T for part in rows], dim=1)
            return torch.cat([part.float().square().sum(1) for part in rows]).cpu(), products.cpu()
        squares, products = torch.zeros(()), torch.zeros(())
        for columns, part in zip(self._columns(), a.split(UNITS_AT_ONCE, dim=1), strict=True):
            own = columns.float()
            squares = squares + own.square().sum(0).cpu()
            products = products + (part.to(own.device).float() @ own).cpu()
        return squares, products

    def _columns(self) -> Iterator[Tensor]:
        """The columns of a head that no one can look at, as its products with unit vectors: [some, tokens]."""
        units = torch.eye(self._embedding.shape[1], dtype=self._embedding.dtype, device=self._embedding.device)
        for some in units.split(UNITS_AT_ONCE):
            yield self._head(some)
