"""Rows may carry the same rows in eight bits, from the operation that wrote them to the product that reads them.

A norm has a row in registers when it writes it, so to round it there saves the product a launch, and reading the row
again. The rounded rows lie beside the rows themselves: adapters, and products in 16 bits, do not notice. They go where
the tensor goes, so whatever makes a new tensor of it (a view, a sum) leaves them behind.
"""

from __future__ import annotations

from torch import Tensor

from rota.engine.quantised.codes import Scaled

_NAME = "_rows_in_eight_bits"


def carry(rows: Tensor, rounded: Scaled) -> Tensor:
    """The same rows; they must not be overwritten as long as a product may read them."""
    setattr(rows, _NAME, rounded)
    return rows


def carried(rows: Tensor) -> Scaled | None:
    """What rows carry, if they do."""
    found: Scaled | None = getattr(rows, _NAME, None)
    return found
