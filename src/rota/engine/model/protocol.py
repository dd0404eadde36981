"""The Model protocol is what the engine needs from a model of any family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rota.engine.layer_cache import LayerCache
from rota.engine.step.device_step import DeviceStep, LoraBatch


class Model(Protocol):
    """Tokens in, hidden states out; a model has no state."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of hidden states and logits."""
        ...

    def tune(self, rows: Sequence[int]) -> None:
        """Find the fastest products for these numbers of rows, before graphs are captured."""
        ...

    def forward(self, step: DeviceStep, cache: list[LayerCache]) -> Tensor:
        """[tokens, hidden size] after the last norm; writes the tokens' keys and values into the cache."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None, lora: LoraBatch | None = None) -> Tensor:
        """[n, hidden size] -> [n, this rank's tokens] in the model's precision, written to `out` if given.

        `lora` says which adapter each of these rows has.
        """
        ...
