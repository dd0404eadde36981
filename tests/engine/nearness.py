"""How far numbers are from what they should be, wherever both lie."""

from __future__ import annotations

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())
