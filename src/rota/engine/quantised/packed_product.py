"""A PackedProduct multiplies few rows by our kernels and more rows in another way; where, it tries out at the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from rota.core.stages import Choice
from rota.engine.autotune import chosen
from rota.engine.model.gemm_choice import graph_milliseconds, processors_of
from rota.engine.quantised.codes import Scaled, carried, carry
from rota.engine.quantised.few_rows import ProductTuning, ended_for, multiply, written_out
from rota.engine.quantised.linear import Product
from rota.engine.quantised.packing import TILE, Packed
from rota.engine.quantised.scaled_product import round_rows
from rota.engine.row_product import RowTuning, multiply_rows

# ── scaled rows ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The product of some ten to some hundred rows in eight-bit floats, x rounded row by row.
#
# Torch's scaled product cuts only the outputs. Of Llama-8B's matrices three have too few of them for all processors
# of an H200: at 64 rows it takes 102 µs for a layer's four, and `row_product.py` 73.


def divides(packed: Packed, step: int) -> bool:
    """Whether a matrix in eight bits is read in whole steps."""
    return packed.bits == 8 and packed.inputs % step == 0


def multiply_scaled(
    x: Scaled, packed: Packed, bias: Tensor | None, ended: Tensor, tuning: RowTuning, dtype: torch.dtype
) -> Tensor:
    """[rows, inputs], in the order of words (`packing.py`) as the matrix -> [rows, outputs]; as `multiply_rows`."""
    assert packed.bits == 8
    codes = packed.words.view(torch.float8_e4m3fn).view(packed.outputs, packed.inputs)
    return multiply_rows(x.codes, codes, (x.scales, packed.marks), bias, ended, tuning, dtype)


# What is done with more rows: (x, bias) -> y.
ManyRows = Callable[[Tensor, Tensor | None], Tensor]
Shapes = TypeVar("Shapes")
# What our kernels do: with x as it is, or with x in eight bits.
Way = ProductTuning | RowTuning
# These numbers of rows are tried; a number between them does as the next one. Each takes kernels to be compiled.
TRIED_ROWS = (4, 16, 64, 128, 256)
# Before trying: up to this many rows our kernel multiplies, by bits. The likeliest shapes fit on any GPU.
FEW_ROWS = {4: 64, 8: 16}
# Matrices in a round: L2 must not hold the next matrix.
MOST_MATRICES = 8
# Programs for each processor, by most rows and by shape: outputs and rows of a program, and warps. Some 30 KiB of the
# matrix are on their way to a processor. Every program reads its rows of x again: the more rows, the more outputs.
SHAPES: dict[int, dict[tuple[int, int, int], tuple[int, ...]]] = {
    16: {(64, 16, 4): (4, 8), (128, 16, 4): (2, 4)},
    64: {(128, 64, 4): (2, 4), (256, 64, 8): (1, 2)},
    256: {(128, 128, 8): (1, 2), (128, 64, 4): (2,), (256, 64, 8): (1,)},
}
# With x in eight bits: outputs of a program, inputs of a step, stages and warps. A program for each processor.
SCALED_SHAPES: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 256, 6, 4), (128, 128, 4, 4)),
    64: ((64, 256, 6, 4), (128, 128, 4, 4)),
    128: ((64, 256, 4, 4), (128, 128, 3, 8)),
    256: ((64, 128, 4, 4), (128, 128, 4, 8)),
}
MOST_SHARES = 16
# Chosen instead of a shape: as more rows are multiplied.
OTHER_WAY: Choice = ()
# Weights that are written out at a time: 64 MiB in 16 bits, about an H200's L2.
MOST_WRITTEN = 2**25


class PackedProduct(Product):
    """One matrix; a choice made for one holds for all of its shape."""

    def __init__(self, packed: Packed, many_rows: ManyRows) -> None:
        self._packed = packed
        self._many_rows = many_rows
        self._ended = ended_for(packed)
        few = FEW_ROWS[packed.bits]
        self._chosen: dict[int, Way | None] = {
            rows: self.tunings(rows)[0] if rows <= few else None for rows in TRIED_ROWS
        }

    @property
    def size_bytes(self) -> int:
        return self._packed.size_bytes + self._ended.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.computed(x, bias, self._tuning_for(x))

    def computed(self, x: Tensor, bias: Tensor | None, way: Way | None) -> Tensor:
        """By one of our kernels in one of its `tunings`; None: as more rows are multiplied."""
        if way is None:
            return self._many_rows(x, bias)
        if isinstance(way, RowTuning):
            return multiply_scaled(carried(x) or round_rows(x), self._packed, bias, self._ended, way, x.dtype)
        return multiply(x, self._packed, bias, self._ended, way)

    def tunings(self, rows: int) -> Sequence[Way]:
        """Shapes of the kernels that may be the fastest, the likeliest first."""
        return tunings_for(self._packed, rows)

    def tune(self, products: Sequence[Product], rows: Sequence[int]) -> None:
        """Some hundred milliseconds, and the time to compile what was not compiled before."""
        alike = [one for one in products if isinstance(one, PackedProduct)]
        for count in sorted({tried for one in rows if (tried := self._tried(one)) is not None}):
            best = self._best(alike[:MOST_MATRICES], count)
            for one in alike:
                one._chosen[count] = best

    def _best(self, alike: Sequence[PackedProduct], rows: int) -> Way | None:
        """What was the fastest at a former start, or is now."""
        packed = self._packed
        ways: dict[Choice, Way | None] = {astuple(way): way for way in self.tunings(rows)} | {OTHER_WAY: None}

        def find() -> Choice:
            best = self._fastest(alike, rows)
            return OTHER_WAY if best is None else astuple(best)

        name = f"{rows} rows by {packed.outputs} x {packed.inputs} in {packed.bits} bits, {packed.steps} steps"
        return ways[chosen(name, find, ways.__contains__)]

    def _fastest(self, alike: Sequence[PackedProduct], rows: int) -> Way | None:
        x = torch.ones(rows, self._packed.inputs, dtype=torch.bfloat16, device=self._ended.device)
        if self._packed.bits == 8:
            carry(x, round_rows(x))  # as most products find it (`ops/fused.py`)
        ways: list[Way | None] = [*self.tunings(rows), None]
        return min(ways, key=lambda way: _milliseconds([partial(one.computed, x, None, way) for one in alike]))

    def _tuning_for(self, x: Tensor) -> Way | None:
        """None: the other way; the kernels multiply numbers of 16 bits, or of eight made from them."""
        tried = self._tried(len(x)) if x.element_size() == 2 else None
        return None if tried is None else self._chosen[tried]

    def _tried(self, rows: int) -> int | None:
        """The number of rows that is tried for this one; None: too many rows for the kernel."""
        return next((one for one in TRIED_ROWS if rows <= one), None)


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


def tunings_for(packed: Packed, rows: int) -> Sequence[Way]:
    """Shapes that fill all processors, and leave each program two steps at least."""
    if packed.bits == 8 and rows > FEW_ROWS[8]:
        return _scaled_tunings(packed, rows)
    scaled = _scaled_tunings(packed, rows) if packed.bits == 8 else []
    found = [
        ProductTuning(columns=columns, rows=tile_rows, warps=warps,
                      shares=_shares(packed, columns, each / triton.cdiv(rows, tile_rows), packed.steps))
        for (columns, tile_rows, warps), programs in _up_to(rows, SHAPES).items()
        for each in programs
    ]  # fmt: skip
    return [*dict.fromkeys(found), *scaled]


def _scaled_tunings(packed: Packed, rows: int) -> Sequence[Way]:
    return [
        RowTuning(columns=columns, shares=_shares(packed, columns, 1, packed.inputs // step), step=step,
                     stages=stages, warps=warps)
        for columns, step, stages, warps in _up_to(rows, SCALED_SHAPES)
        if divides(packed, step)
    ]  # fmt: skip


def _up_to(rows: int, shapes: Mapping[int, Shapes]) -> Shapes:
    """Those for the smallest number of rows that is not below this one."""
    return next(some for most, some in shapes.items() if rows <= most)


def _shares(packed: Packed, columns: int, per_processor: float, steps: int) -> int:
    tiles = triton.cdiv(packed.outputs, columns)
    wanted = round(per_processor * processors_of(packed.words.device) / tiles)
    return _power_of_two(min(MOST_SHARES, max(1, steps // 2), wanted))


def _milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Infinity for a shape that needs more shared memory than this GPU has."""
    try:
        return graph_milliseconds(calls)
    except OutOfResources:
        return math.inf


def _power_of_two(most: int) -> int:
    return 2 ** (max(1, most).bit_length() - 1)
