"""Matrices as a folder stores them in few bits, before they take the form that a device multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest eight-bit float, E4M3.
LARGEST = 448.0
# A row whose numbers are all smaller counts as a row of zeros: 448 / smallest is still finite.
SMALLEST = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A matrix in eight-bit floats: weight = code * scale, with one scale for each output."""

    codes: Tensor  # [outputs, inputs] float8_e4m3fn
    scales: Tensor  # [outputs] float32

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        return self.codes.to(torch.float32) * self.scales[:, None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Codes:
    """A matrix in four bits: weight = (code - zero) * scale, with a scale and a zero for each group of inputs."""

    codes: Tensor  # [outputs, inputs] uint8, 0 … 15
    scales: Tensor  # [outputs, groups] float32
    zeros: Tensor  # [outputs, groups] float32; need not be whole
    groups: Tensor  # [inputs] int64: the group of each input; sorted unless the inputs were reordered by importance

    def weights(self) -> Tensor:
        """[outputs, inputs] float32: the matrix itself."""
        return (self.codes.float() - self.zeros[:, self.groups]) * self.scales[:, self.groups]


# ── carried ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Rows may carry the same rows in eight bits, from the operation that wrote them to the product that reads them.
#
# A norm has a row in registers when it writes it, so to round it there saves the product a launch, and reading the
# row again. The rounded rows lie beside the rows themselves: adapters, and products in 16 bits, do not notice. They
# go where the tensor goes, so whatever makes a new tensor of it (a view, a sum) leaves them behind.

_NAME = "_rows_in_eight_bits"


def carry(rows: Tensor, rounded: Scaled | None) -> Tensor:
    """The same rows; they must not be overwritten as long as a product may read them."""
    if rounded is not None:
        setattr(rows, _NAME, rounded)
    return rows


def carried(rows: Tensor) -> Scaled | None:
    """What rows carry, if they do."""
    found: Scaled | None = getattr(rows, _NAME, None)
    return found
