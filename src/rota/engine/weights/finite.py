"""Weights must be finite, or the answers are noise: every tensor is checked once, on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Checks the extremes, which show NaN and infinity. isfinite() takes 75 times as long for bfloat16 on a CPU."""
    return all(math.isfinite(extreme.item()) for extreme in _comparable(values).aminmax())


def _comparable(values: Tensor) -> Tensor:
    """Torch does not compare eight-bit floats; float16 has all of their values."""
    return values.half() if values.dtype is torch.float8_e4m3fn else values


class FiniteCheck:
    """Notes the extremes of many tensors without waiting for the device, and checks them once, at the end."""

    def __init__(self) -> None:
        self._extremes: dict[str, Tensor] = {}

    def note(self, name: str, values: Tensor) -> None:
        self._extremes[name] = torch.stack(_comparable(values).aminmax()).float()

    def not_finite(self) -> list[str]:
        """The names of tensors with NaN or infinity; waits for the device."""
        are_finite = torch.stack(list(self._extremes.values())).isfinite().all(dim=1).tolist()
        return [name for name, is_fine in zip(self._extremes, are_finite, strict=True) if not is_fine]
