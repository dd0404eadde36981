"""Projections by matrices in few bits, on a GPU by our kernels and on a CPU by their references."""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.model.linear import Projection, projection
from rota.engine.quantised.codes import LARGEST, SMALLEST, Codes, Scaled
from rota.engine.quantised.linear import FewBitsLinear, Product
from rota.engine.quantised.packing import pack_eight_bits, pack_four_bits, step_of

# ── eight-bit floats ────────────────────────────────────────────────────────────────────────────────────────────────
# The matrix is rounded once, with a scale for each output, and x in every product.
#
#     x Wᵀ  =  (codes of x) (codes of W)ᵀ * scale of the row * scale of the output
#
# A row of x has one scale, its absolute maximum / 448. So nothing needs calibration, and no row depends on another.

# Both sizes of a matrix must be a multiple of this for the tensor cores.
PORTION = 16


def fits_eight_bits(outputs: int, inputs: int) -> bool:
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
    """x Wᵀ + b in eight-bit floats; few rows of x need not be rounded (`few_rows.py`)."""
    if matrix.codes.device.type == "cpu":
        return FewBitsLinear(EightBitReference(matrix), bias)
    # Imported here: Triton is not everywhere.
    from rota.engine.quantised.packed_product import PackedProduct
    from rota.engine.quantised.scaled_product import ScaledProduct

    packed = pack_eight_bits(matrix)
    return FewBitsLinear(PackedProduct(packed, ScaledProduct(packed)), bias)


# ── four bits ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Few rows are multiplied by our kernel, which reads the four bits; for more rows the matrix is written out first. The
# kernel knows groups of 32 inputs or a multiple of that, equally long, and zeros that are whole. Inputs in the order of
# their importance are sorted once, and the columns of x in every product. Any other matrix is kept whole.


class FourBitReference(Product):
    """The product on a CPU, for tests: each weight is rounded to x's precision, then multiplied in float32."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes

    @property
    def size_bytes(self) -> int:
        # As on a GPU: two codes to a byte, and a word for each group.
        return self._codes.codes.numel() // 2 + self._codes.scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.float() @ self._codes.weights().to(x.dtype).float().T
        return (y if bias is None else y.add_(bias)).to(x.dtype)


def four_bit_linear(codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> Projection:
    """x Wᵀ + b with the matrix in four bits."""
    if codes.codes.device.type == "cpu":
        return FewBitsLinear(FourBitReference(codes), bias)
    step = step_of(codes)
    if step is None:
        return projection(codes.weights().to(dtype), bias)
    # Imported here: Triton is not everywhere.
    from rota.engine.quantised.packed_product import PackedProduct, WrittenOutProduct

    order = None
    if not torch.equal(codes.groups, codes.groups.sort().values):
        order = codes.groups.argsort(stable=True)
        codes = in_order(codes, order)
    packed = pack_four_bits(codes, step)
    return FewBitsLinear(PackedProduct(packed, WrittenOutProduct(packed)), bias, order)


def in_order(codes: Codes, order: Tensor) -> Codes:
    """The same matrix with its inputs in another order."""
    return Codes(codes=codes.codes[:, order], scales=codes.scales, zeros=codes.zeros, groups=codes.groups[order])
