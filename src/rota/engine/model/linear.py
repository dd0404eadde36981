"""A projection is a matrix product of the model; an adapter adds to its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from rota.engine.model.gemm_choice import GemmChoice
from rota.engine.padding import pad_rows


class Projection(Protocol):
    """A product by a matrix of the model, whatever the matrix's form in memory."""

    @property
    def widened(self) -> Matrix | None:
        """The same with the adapters' rows below, if the site has a fused LoRA A."""
        ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def keeps_weight(self) -> bool:
        """Whether the projection keeps the tensor it was made from."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        ...


@runtime_checkable
class Tunes(Protocol):
    """A projection that finds its fastest product itself."""

    def tune(self, alike: Sequence[Projection], rows: Sequence[int]) -> None:
        """Try its products for these numbers of rows, for all projections alike: the same site of every layer."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """x Wᵀ + b, the weight as [outputs, inputs], by the fastest way on its device."""

    weight: Tensor
    bias: Tensor | None = None
    gemm: GemmChoice | None = None
    keeps_weight: ClassVar[bool] = True

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None and self.gemm is not None:
            return self.gemm(x, self.weight)
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Linear(Matrix):
    """A matrix of the model; with a fused LoRA A also the same with adapters' rows below (`lora/layout.py`)."""

    widened: Matrix | None = None


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A Linear whose weight lies in oneDNN's own order; a plain product would reorder the weight in every call.

    All of SmolLM2's matrices once, in bf16 on two busy cores of a Xeon with AMX: 10 to 45 % less time in single runs,
    29 % (1 row) and 19 % (16 rows) less between the medians of six rounds.
    """

    weight: Tensor
    bias: Tensor | None = None
    widened: None = None  # only a GPU's matrices have fused LoRA A
    keeps_weight: ClassVar[bool] = False

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded, bias = pad_rows(x), self.bias
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(padded, self.weight, bias, "none", [], "")
        return product[:rows]


def projection(weight: Tensor, bias: Tensor | None = None, gemm: GemmChoice | None = None) -> Projection:
    """The fastest form of a matrix on its device; a packed form is a copy, and the caller may drop `weight`."""
    if weight.device.type != "cpu" or not _packs(weight.dtype):
        return Linear(weight, bias, gemm)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias)


def tune_gemms(projections: Sequence[Projection], rows: Sequence[int]) -> None:
    """Find the fastest product for matrices of one shape, one for each layer; widened matrices are tuned apart."""
    if tunes := [one for one in projections if isinstance(one, Tunes)]:
        tunes[0].tune(projections, rows)
    matrices = [one for one in projections if isinstance(one, Linear)]
    for some in (matrices, [one.widened for one in matrices if one.widened is not None]):
        if some and (gemm := some[0].gemm) is not None:
            gemm.tune([one.weight for one in some], rows)


def _packs(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies the precision through oneDNN; packing does not make float32 faster."""
    if not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
