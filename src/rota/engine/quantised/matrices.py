"""FourBit makes a model's matrices in four bits, in the form that this processor multiplies fastest.

    dynamic       four bits alone, for any number of rows
    weight-only   four bits for few rows; the whole matrix for more rows, since it is faster there

SmolLM2's layers on a Xeon (2026-11-15, one thread, torch 2.13), in ms for 1, 4 and 16 rows: in four bits 8, 14 and 52,
in bfloat16 with AMX 20, 20 and 19, in float32 26, 49 and 69.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from rota.engine.model.linear import Projection, projection
from rota.engine.parallel.shard import Cut
from rota.engine.quantised.groups import GROUP, MIDDLE, Groups, in_eight_bits, in_four_bits, side_by_side, stacked
from rota.engine.quantised.maker import MatrixMaker, Parts
from rota.engine.quantised.names import CODES, GROUPS_FILE, MINIMA, SCALES

# ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Products by a matrix in four bits: torch's for ARM and for x86.


class DynamicProduct:
    """ARM's product: rounds each row of x to eight bits, then multiplies integers.

    The product has scales but no middles. A second, small product adds the middles: a group's middle times the sum of x
    over that group.
    """

    def __init__(self, groups: Groups) -> None:
        self._inputs, self._outputs = groups.inputs, groups.outputs
        # KleidiAI takes scales in bfloat16; with other scales torch computes slowly, one number at a time.
        scales = groups.scales.bfloat16()
        self._weight = torch.ops.aten._dyn_quant_pack_4bit_weight(
            groups.codes, scales, None, GROUP, groups.inputs, groups.outputs
        )
        # Groups without middles come first, if there are any; they add zero.
        self._first = int((groups.middles != 0).any(0).int().argmax())
        self._middles = groups.middles[:, self._first :].T.contiguous()

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + self._middles.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        exact = x.float()
        y: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(exact, self._weight, GROUP, self._inputs, self._outputs)
        sums = exact.unflatten(1, (-1, GROUP))[:, self._first :].sum(2)
        return y.addmm_(sums, self._middles).to(x.dtype)


class WeightOnlyProduct:
    """x86's product: multiplies x in bfloat16 by weights that it unpacks meanwhile; fast for few rows of x."""

    def __init__(self, groups: Groups) -> None:
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.unpacked().int(), 1)
        pairs = torch.stack((groups.scales.T, groups.middles.T), dim=2)
        self._scales_and_middles = pairs.bfloat16().contiguous()

    @property
    def size_bytes(self) -> int:
        return self._weight.nbytes + self._scales_and_middles.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self._weight, GROUP, self._scales_and_middles
        )
        return y.to(x.dtype)


Kind = Literal["dynamic", "weight-only"]
# By precision: up to this many rows four bits are faster than the whole matrix. In float32 they are faster up to some
# ten rows with AVX2, and beyond sixteen rows with AVX-512.
FEW_ROWS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 8}
# The outputs of a weight-only product are a multiple of this.
PORTION = 16
# A group's codes, its scale and its middle, as the products hold them.
BYTES_OF_GROUP = GROUP // 2 + 6


class FourBitLinear:
    """A matrix in four bits, or in eight bits as two of four; it keeps the whole matrix where that is faster."""

    widened = None

    def __init__(
        self,
        product: DynamicProduct | WeightOnlyProduct,
        bias: Tensor | None,
        is_doubled: bool = False,
        whole: Projection | None = None,
        few_rows: int = 0,
    ) -> None:
        self._product = product
        self._bias = bias
        self._is_doubled = is_doubled
        self._whole = whole
        self._few_rows = few_rows

    @property
    def size_bytes(self) -> int:
        return self._product.size_bytes + (0 if self._whole is None else self._whole.size_bytes)

    @property
    def keeps_weight(self) -> bool:
        return self._whole is not None and self._whole.keeps_weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._whole is not None and x.shape[0] > self._few_rows:
            return self._whole(x)
        y = self._product(torch.cat((x, x), 1) if self._is_doubled else x)
        return y if self._bias is None else y.add_(self._bias)


class GroupsFile:
    """Groups by the names of their weights, beside the weights of a folder that was converted from four and eight bits.

    Empty if there is no file.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / GROUPS_FILE
        self._file: Any = safe_open(path, framework="pt") if path.is_file() else None
        self._names = frozenset(self._file.keys()) if self._file is not None else frozenset()

    @property
    def is_there(self) -> bool:
        return self._file is not None

    def find(self, name: str, cut: Cut | None = None) -> Groups | None:
        """The groups of a weight, or of a stretch of it that cuts no group; None if the file has none for it."""
        if name + CODES not in self._names:
            return None
        is_byte = self._file.get_slice(name + CODES).get_dtype() == "I8"
        codes = self._tensor(name + CODES, cut, 1 if is_byte else 2)
        scales = self._tensor(name + SCALES, cut, GROUP).float()
        if is_byte:
            return side_by_side(codes, scales)
        return Groups(codes, scales, self._tensor(name + MINIMA, cut, GROUP).float() + MIDDLE * scales)

    def _tensor(self, name: str, cut: Cut | None, inputs: int) -> Tensor:
        """A tensor whose every number stands for so many inputs."""
        if cut is None:
            whole: Tensor = self._file.get_tensor(name)
            return whole
        width = inputs if cut.axis else 1
        stretch = slice(cut.first // width, cut.end // width)
        part: Tensor = self._file.get_slice(name)[(slice(None),) * cut.axis + (stretch,)]
        # The products' packing reads rows one after the other, and columns of a file lie apart.
        return part.contiguous()


class FourBit(MatrixMaker):
    """Takes groups as they are from the file, and rounds the other matrices to groups."""

    def __init__(self, kind: Kind, file: GroupsFile) -> None:
        self._kind = kind
        self._file = file

    def fits(self, _names: Sequence[str], outputs: int, inputs: int) -> bool:
        """Whether a matrix can be in four bits."""
        return inputs % GROUP == 0 and (self._kind == "dynamic" or outputs % PORTION == 0)

    def size_bytes(self, outputs: int, inputs: int, dtype_bytes: int) -> int:
        whole = outputs * inputs * dtype_bytes if self._kind == "weight-only" else 0
        return outputs * inputs // GROUP * BYTES_OF_GROUP + whole

    def site(self, parts: Parts) -> FourBitLinear:
        """The matrix is read only if the file lacks a part's groups, or if the product needs both."""
        names = parts.names
        found = [groups for name in names if (groups := self._file.find(name, parts.cut_of(name))) is not None]
        whole = parts.weight() if self._kind == "weight-only" or len(found) < len(names) else None
        groups = stacked(found) if len(found) == len(names) else in_four_bits(_present(whole))
        return self.linear(groups, parts.bias, whole)

    def head(self, name: str, weight: Tensor, cut: Cut | None = None) -> FourBitLinear:
        """In eight bits: the head decides between tokens, and needs the precision."""
        groups = self._file.find(name, cut) or in_eight_bits(weight)
        return self.linear(groups, None, weight, is_doubled=groups.inputs == 2 * weight.shape[1])

    def linear(
        self, groups: Groups, bias: Tensor | None, whole: Tensor | None, is_doubled: bool = False
    ) -> FourBitLinear:
        """The product by these groups; a weight-only one needs the whole matrix too."""
        if self._kind == "dynamic":
            return FourBitLinear(DynamicProduct(groups), bias, is_doubled)
        weight = _present(whole)
        product = WeightOnlyProduct(groups)
        return FourBitLinear(product, bias, is_doubled, projection(weight, bias), FEW_ROWS[weight.dtype])


def _present(weight: Tensor | None) -> Tensor:
    assert weight is not None, "the weights of a matrix that is not in the file are read"
    return weight
