"""BaseEnds tells rows of the model's embedding and head: an adapter may have its own in the place of some of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rota.core.extras import Extra
from rota.engine.model.linear import Matrix, Projection

# Unit vectors in one product: each gives a number for every token.
UNITS_AT_ONCE = 64


class BaseEnds:
    """The ends below a bank's ends; asked for a few rows when an adapter is read."""

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
        units = torch.eye(self._embedding.shape[1], dtype=self._embedding.dtype, device=self._embedding.device)
        return torch.cat([self._head(some)[:, list(tokens)] for some in units.split(UNITS_AT_ONCE)]).T.float().cpu()
