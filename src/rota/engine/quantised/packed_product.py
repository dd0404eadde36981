"""A PackedProduct multiplies few rows by our kernel and more rows in another way; where, it tries out at the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from rota.engine.model.timed import graph_milliseconds
from rota.engine.quantised.few_rows import MOST_ROWS, Tuning, multiply, written_out
from rota.engine.quantised.linear import Product
from rota.engine.quantised.packing import TILE, Packed

# What is done with more rows: (x, bias) -> y.
ManyRows = Callable[[Tensor, Tensor | None], Tensor]
# These numbers of rows are tried; a number between them does as the next one.
TRIED_ROWS = (4, 16, 32, MOST_ROWS)
# Before trying: up to this many rows our kernel multiplies, by bits.
FEW_ROWS = {4: MOST_ROWS, 8: 16}
# Matrices in a round: L2 must not hold the next matrix.
MOST_MATRICES = 8
# Outputs of a program, and programs for each processor, so that some 30 KiB of the matrix are on their way to each.
SHAPES = ((64, 4), (128, 2), (128, 4), (64, 8))
MOST_SHARES = 16
# Weights that are written out at a time: 64 MiB in 16 bits, about an H200's L2.
MOST_WRITTEN = 2**25


class PackedProduct:
    """One matrix; a choice made for one holds for all of its shape."""

    def __init__(self, packed: Packed, many_rows: ManyRows) -> None:
        self._packed = packed
        self._many_rows = many_rows
        self._ended = torch.zeros(triton.cdiv(packed.outputs, TILE), dtype=torch.int32, device=packed.words.device)
        self.tunings = tunings_for(packed)
        likeliest = self.tunings[0]
        self._chosen = {rows: likeliest if rows <= FEW_ROWS[packed.bits] else None for rows in TRIED_ROWS}

    @property
    def size_bytes(self) -> int:
        return self._packed.size_bytes + self._ended.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.computed(x, bias, self._tuning_for(x))

    def computed(self, x: Tensor, bias: Tensor | None, tuning: Tuning | None) -> Tensor:
        """By our kernel in one of its `tunings`; None: as more rows are multiplied."""
        if tuning is None:
            return self._many_rows(x, bias)
        return multiply(x, self._packed, bias, self._ended, tuning)

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:
        """Some hundred milliseconds, and the time to compile what was not compiled before."""
        alike = [one for one in products if isinstance(one, PackedProduct)]
        for count in sorted({_tried(one) for one in rows if one <= MOST_ROWS}):
            best = self._fastest(alike[:MOST_MATRICES], count)
            for one in alike:
                one._chosen[count] = best

    def _fastest(self, alike: Sequence[PackedProduct], rows: int) -> Tuning | None:
        x = torch.ones(rows, self._packed.inputs, dtype=torch.bfloat16, device=self._ended.device)
        ways: list[Tuning | None] = [*self.tunings, None]
        return min(ways, key=lambda way: _milliseconds([partial(one.computed, x, None, way) for one in alike]))

    def _tuning_for(self, x: Tensor) -> Tuning | None:
        """None: the other way; the kernel multiplies numbers of 16 bits."""
        return self._chosen[_tried(len(x))] if len(x) <= MOST_ROWS and x.element_size() == 2 else None


class WrittenOutProduct:
    """x Wᵀ + b with the matrix written out, some outputs at a time."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        packed = self._packed
        portion = max(TILE, MOST_WRITTEN // packed.inputs // TILE * TILE)
        if packed.outputs <= portion:
            return functional.linear(x, written_out(packed, x.dtype, 0, packed.outputs), bias)
        y = torch.empty(len(x), packed.outputs, dtype=x.dtype, device=x.device)
        for first in range(0, packed.outputs, portion):
            end = min(first + portion, packed.outputs)
            torch.mm(x, written_out(packed, x.dtype, first, end).t(), out=y[:, first:end])
        return y if bias is None else y.add_(bias)


def tunings_for(packed: Packed) -> list[Tuning]:
    """Shapes of the kernel that may be the fastest, the likeliest first."""
    found = []
    for columns, per_processor in SHAPES:
        programs = per_processor * _processors(packed.words.device) / triton.cdiv(packed.outputs, columns)
        most = min(MOST_SHARES, max(1, packed.steps // 2))
        shares = min(2 ** max(0, round(programs).bit_length() - 1), 2 ** (most.bit_length() - 1))
        found.append(Tuning(columns=columns, shares=shares))
    return list(dict.fromkeys(found))


def _milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Infinity for a shape that needs more shared memory than this GPU has."""
    try:
        return graph_milliseconds(calls)
    except OutOfResources:
        return math.inf


def _tried(rows: int) -> int:
    return next(one for one in TRIED_ROWS if rows <= one)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
