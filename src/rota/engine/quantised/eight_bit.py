"""Products in eight-bit floats: the matrix is rounded once, with a scale for each output, and x in every product.

    x Wᵀ  =  (codes of x) (codes of W)ᵀ * scale of the row * scale of the output

A row of x has one scale, its absolute maximum / 448. So nothing needs calibration, and no row depends on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rota.engine.quantised.codes import Scaled

# The largest number that E4M3 has.
LARGEST = 448.0
# A row whose numbers are all smaller counts as a row of zeros: 448 / smallest is still finite.
SMALLEST = 1e-30
# Both sizes of a matrix must be a multiple of this for the tensor cores.
PORTION = 16


def fits(outputs: int, inputs: int) -> bool:
    """Whether a matrix of these sizes can be multiplied in eight-bit floats."""
    return outputs % PORTION == 0 and inputs % PORTION == 0


def in_eight_bit_floats(weight: Tensor) -> Scaled:
    """The nearest codes of a matrix, one scale for each output: its absolute maximum / 448; zeros get scale 1."""
    exact = weight.float()
    scales = exact.abs().amax(1) / LARGEST
    scales = scales.where(scales > 0, 1.0)
    codes = (exact / scales[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Scaled(codes, scales)


def rounded_rows(x: Tensor) -> Scaled:
    """The same for rows of x; a row with an infinity or NaN gets the scale NaN, so that its product is NaN too."""
    exact = x.float()
    largest = exact.abs().amax(1).clamp_(min=SMALLEST)
    scales = (largest / LARGEST).where(largest.isfinite(), torch.nan)
    return Scaled((exact * (LARGEST / largest)[:, None]).to(torch.float8_e4m3fn), scales)


def product_reference(x: Scaled, matrix: Scaled) -> Tensor:
    """[rows, outputs] float32: the product of codes, then the scales."""
    y = x.codes.float() @ matrix.codes.float().T
    return y.mul_(x.scales[:, None]).mul_(matrix.scales)


@dataclass(frozen=True, slots=True, eq=False)
class EightBitFloatLinear:
    """x Wᵀ + b in eight-bit floats; on a CPU the reference, for tests."""

    matrix: Scaled
    bias: Tensor | None = None
    widened: ClassVar[None] = None
    keeps_weight: ClassVar[bool] = False

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.matrix.codes.nbytes + self.matrix.scales.nbytes + bias

    def __call__(self, x: Tensor) -> Tensor:
        y = product_reference(rounded_rows(x), self.matrix)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)
