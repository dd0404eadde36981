"""Products in eight-bit floats: the matrix is rounded once, with a scale for each output, and x in every product.

    x Wᵀ  =  (codes of x) (codes of W)ᵀ * scale of the row * scale of the output

A row of x has one scale, its absolute maximum / 448. So nothing needs calibration, and no row depends on another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.quantised.codes import LARGEST, SMALLEST, Scaled
from rota.engine.quantised.linear import FewBitsLinear, Product
from rota.engine.quantised.packing import pack_eight_bits

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
    # Torch divides a number by a tensor through a reciprocal, which rounds twice.
    factors = torch.full_like(largest, LARGEST).div_(largest)
    return Scaled((exact * factors[:, None]).to(torch.float8_e4m3fn), scales)


def product_reference(x: Scaled, matrix: Scaled) -> Tensor:
    """[rows, outputs] float32: the product of codes, then the scales."""
    y = x.codes.float() @ matrix.codes.float().T
    return y.mul_(x.scales[:, None]).mul_(matrix.scales)


class EightBitReference(Product):
    """The product on a CPU, for tests."""

    def __init__(self, matrix: Scaled) -> None:
        self._matrix = matrix

    @property
    def size_bytes(self) -> int:
        return self._matrix.codes.nbytes + self._matrix.scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = product_reference(rounded_rows(x), self._matrix)
        return (y if bias is None else y.add_(bias)).to(x.dtype)


def eight_bit_linear(matrix: Scaled, bias: Tensor | None = None) -> FewBitsLinear:
    """x Wᵀ + b in eight-bit floats; few rows of x need not be rounded (`few_rows_kernels.py`)."""
    if matrix.codes.device.type == "cpu":
        return FewBitsLinear(EightBitReference(matrix), bias)
    # Triton is not everywhere.
    from rota.engine.quantised.packed_product import PackedProduct
    from rota.engine.quantised.scaled_product import ScaledProduct

    packed = pack_eight_bits(matrix)
    return FewBitsLinear(PackedProduct(packed, ScaledProduct(packed)), bias)
