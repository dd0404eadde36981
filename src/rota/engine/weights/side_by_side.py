"""Products side by side are a projection of parts that no single product can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rota.engine.model.linear import Projection, tune_gemms


class SideBySide:
    """The outputs of some projections of the same x, one after the other."""

    widened = None
    keeps_weight = False

    def __init__(self, projections: Sequence[Projection]) -> None:
        self._projections = projections

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._projections)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([one(x) for one in self._projections], 1)

    def tune(self, alike: Sequence[Projection], rows: Sequence[int]) -> None:
        """Part by part: the same part of every layer."""
        for parts in zip(*(one._projections for one in alike if isinstance(one, SideBySide)), strict=True):
            tune_gemms(parts, rows)
