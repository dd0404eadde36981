"""Makers for weights in few bits: what a folder stores is taken as it is, and plain weights are rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rota.engine.model.linear import Projection, projection, tune_gemms
from rota.engine.quantised.codes import Codes, Scaled
from rota.engine.quantised.groups import as_groups, in_codes, stacked
from rota.engine.quantised.maker import MatrixMaker, Parts, StoredMatrix
from rota.engine.quantised.matrices import FourBit
from rota.engine.quantised.products import eight_bit_linear, fits_eight_bits, four_bit_linear, in_eight_bit_floats
from rota.engine.weights.layouts.layout import WEIGHT

# ── side by side ────────────────────────────────────────────────────────────────────────────────────────────────────
# Products side by side are a projection of parts that no single product can hold.


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


Holds = Callable[[str], bool]
# A scale, and a group's scale and zero in one word.
SCALE_BYTES = 4


def everything(_module: str) -> bool:
    """Every matrix is rounded, also those that no folder stores in few bits."""
    return True


class EightBitFloats(MatrixMaker):
    """Matrices in eight-bit floats; those of one scale for each output are taken as they are stored."""

    def __init__(self, holds: Holds = everything) -> None:
        self._holds = holds

    def fits(self, names: Sequence[str], outputs: int, inputs: int) -> bool:
        return fits_eight_bits(outputs, inputs) and _hold(self._holds, names)

    def size_bytes(self, outputs: int, inputs: int, _dtype_bytes: int) -> int:
        return outputs * (inputs + SCALE_BYTES)

    def site(self, parts: Parts) -> Projection:
        """Plain weights are read matrix by matrix, so that no more than one lies on the device in full."""
        found = _found(parts)
        if found is None:
            return eight_bit_linear(in_eight_bit_floats(parts.weight()), parts.bias)
        scaled = [one if isinstance(one, Scaled) else in_eight_bit_floats(one.weights()) for one in found]
        # Torch joins bytes on every device, but not eight-bit floats.
        codes = torch.cat([one.codes.view(torch.uint8) for one in scaled]).view(torch.float8_e4m3fn)
        return eight_bit_linear(Scaled(codes, torch.cat([one.scales for one in scaled])), parts.bias)


class FourBitCodes(MatrixMaker):
    """A GPU's matrices in four bits, of groups of this size (None: all inputs)."""

    def __init__(self, holds: Holds, group_size: int | None, dtype: torch.dtype) -> None:
        self._holds = holds
        self._group_size = group_size
        self._dtype = dtype

    def fits(self, names: Sequence[str], _outputs: int, _inputs: int) -> bool:
        return _hold(self._holds, names)

    def size_bytes(self, outputs: int, inputs: int, _dtype_bytes: int) -> int:
        groups = -(-inputs // (self._group_size or inputs))
        return outputs * (inputs // 2 + SCALE_BYTES * groups)

    def site(self, parts: Parts) -> Projection:
        """Random weights, which no folder stores, are rounded."""
        found = _codes(parts)
        if found is None:
            weight = parts.weight()
            found = [in_codes(weight, self._group_size or weight.shape[1])]
        if all(torch.equal(one.groups, found[0].groups) for one in found):
            return four_bit_linear(joined(found), parts.bias, self._dtype)
        # Inputs that each part has in an order of its own: as many products as parts.
        widths = [len(one.codes) for one in found]
        biases = [None] * len(found) if parts.bias is None else parts.bias.split(widths)
        pairs = zip(found, biases, strict=True)
        return SideBySide([four_bit_linear(one, bias, self._dtype) for one, bias in pairs])


class FourBitGroups(MatrixMaker):
    """A CPU's matrices in four bits, from a folder that stores them so; what makes no groups of 32 becomes plain."""

    def __init__(self, holds: Holds, four_bit: FourBit, dtype: torch.dtype) -> None:
        self._holds = holds
        self._four_bit = four_bit
        self._dtype = dtype

    def fits(self, names: Sequence[str], outputs: int, inputs: int) -> bool:
        return _hold(self._holds, names) and self._four_bit.fits(names, outputs, inputs)

    def size_bytes(self, outputs: int, inputs: int, dtype_bytes: int) -> int:
        return self._four_bit.size_bytes(outputs, inputs, dtype_bytes)

    def site(self, parts: Parts) -> Projection:
        found = _codes(parts)
        if found is None:  # random weights
            return self._four_bit.site(parts)
        whole = torch.cat([one.weights().to(self._dtype) for one in found])
        groups = [each for one in found if (each := as_groups(one)) is not None]
        if len(groups) < len(found):
            return projection(whole, parts.bias)
        return self._four_bit.linear(stacked(groups), parts.bias, whole)


def joined(parts: Sequence[Codes]) -> Codes:
    """Matrices whose inputs have the same groups, one below the other."""
    return Codes(
        codes=torch.cat([one.codes for one in parts]),
        scales=torch.cat([one.scales for one in parts]),
        zeros=torch.cat([one.zeros for one in parts]),
        groups=parts[0].groups,
    )


def _hold(holds: Holds, names: Sequence[str]) -> bool:
    """A site whose parts are stored in different ways stays plain."""
    return all(holds(name.removesuffix(WEIGHT)) for name in names)


def _found(parts: Parts) -> list[StoredMatrix] | None:
    found = [one for name in parts.names if (one := parts.find(name)) is not None]
    return found if len(found) == len(parts.names) else None


def _codes(parts: Parts) -> list[Codes] | None:
    found = _found(parts)
    return None if found is None else [one for one in found if isinstance(one, Codes)]
