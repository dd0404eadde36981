"""A GemmChoice says who computes a product on a GPU: one of two libraries, or for few rows a kernel of ours.

A product without a bias goes through cuBLAS, a product with a bias through cuBLASLt. Their choices of kernels differ.
Llama-8B's `down` on an H200 (2026-11-15), without and with a bias of zeros: 32.0 and 33.5 µs for 16 rows, 35.0 and
32.6 for 64, 38.2 and 34.1 for 112.

Our kernel (`row_product.py`) begins to read its matrix while the norm before it ends. A norm and `qkv` took 16.8 µs for
one row and 18.4 for 64 with cuBLAS, 14.5 and 16.5 with ours (2026-11-17).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rota.core.stages import Choice
from rota.engine.autotune import chosen

if TYPE_CHECKING:
    from rota.engine.row_product import RowTuning


# ── timed ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# The time that some calls take on a GPU, without the time of their launches.

ROUNDS = 3


def graph_milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """All calls once: the best of some rounds, in a graph, since a launch takes longer than a small product."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # see `capture_graphs`
        for call in calls:
            call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    graph.replay()
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in marks)


# For fewer rows cuBLAS is as good. For more rows it is so on the whole: all four matrices of a layer took 131.7 and
# 134.3 µs for 128 rows, 179.2 and 179.6 for 256.
FEWEST_ROWS, MOST_ROWS = 24, 128
# Up to so many rows our kernel is tried. At 64 it was quicker alone (16.5 and 18.4 µs) and no quicker in a step.
OUR_ROWS = 16
# Outputs of a program, inputs of a step, stages and warps: for a matrix with few outputs, and with many.
NARROW, WIDE = (64, 128, 6, 4), (128, 64, 4, 4)
# Matrices in a round: L2 must not hold the next matrix.
MOST_MATRICES = 8
# Another way than cuBLAS is taken if it needs less than this share of the time: a difference beyond chance.
WORTH_IT = 0.98

PLAIN, WITH_BIAS = (0,), (1,)
# Chosen instead of a shape of our kernel: a library is quicker.
A_LIBRARY: Choice = ()

# (x, weight) -> y.
Way = Callable[[Tensor, Tensor], Tensor]


class GemmChoice:
    """The choice for matrices of one shape; before `tune`, and for other numbers of rows, cuBLAS multiplies."""

    def __init__(self, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._zeros = torch.zeros(outputs, dtype=dtype, device=device)
        self._with_bias: set[int] = set()
        self._ours: RowTuning | None = None
        # Of all matrices: no two products of one shape run at the same time.
        self._ended = torch.zeros(outputs, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        return self._way_for(len(x))(x, weight)

    @torch.inference_mode()
    def tune(self, weights: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Try the ways for these numbers of rows: a few milliseconds for each number."""
        (outputs, inputs), dtype, some = weights[0].shape, weights[0].dtype, weights[:MOST_MATRICES]
        for count in rows:
            if FEWEST_ROWS <= count <= MOST_ROWS:
                name = f"a bias for {count} rows by {outputs} x {inputs} in {dtype}"
                find = partial(self._with_bias_or_not, some, count)
                if chosen(name, find, lambda choice: choice in (PLAIN, WITH_BIAS)) == WITH_BIAS:
                    self._with_bias.add(count)
        ours = _tuning_for(weights[0])
        if ours is not None and min(rows) <= OUR_ROWS:
            name = f"our kernel for {OUR_ROWS} rows by {outputs} x {inputs} in {dtype}"
            find = partial(self._ours_or_not, some, ours)
            if chosen(name, find, (A_LIBRARY, astuple(ours)).__contains__) != A_LIBRARY:
                self._ours = ours

    def _way_for(self, rows: int) -> Way:
        if rows <= OUR_ROWS and self._ours is not None:
            return partial(self._by_ours, self._ours)
        return self._by_cublaslt if rows in self._with_bias else functional.linear

    def _with_bias_or_not(self, weights: Sequence[Tensor], rows: int) -> Choice:
        plain, with_bias = (_milliseconds(rows, weights, way) for way in (functional.linear, self._by_cublaslt))
        return WITH_BIAS if with_bias < WORTH_IT * plain else PLAIN

    def _ours_or_not(self, weights: Sequence[Tensor], ours: RowTuning) -> Choice:
        from triton.runtime.errors import OutOfResources

        library = _milliseconds(OUR_ROWS, weights, functional.linear)
        try:
            mine = _milliseconds(OUR_ROWS, weights, partial(self._by_ours, ours))
        except OutOfResources:  # a newer GPU may have less shared memory than a Hopper
            return A_LIBRARY
        return astuple(ours) if mine < WORTH_IT * library else A_LIBRARY

    def _by_cublaslt(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight, self._zeros)

    def _by_ours(self, ours: RowTuning, x: Tensor, weight: Tensor) -> Tensor:
        from rota.engine.row_product import multiply_rows

        return multiply_rows(x, weight, None, None, self._ended, ours, x.dtype)


def _tuning_for(weight: Tensor) -> RowTuning | None:
    """The shape of our kernel that keeps all processors reading; None where it cannot be used."""
    if not weight.is_cuda or weight.element_size() != 2:
        return None
    from rota.engine.programmatic_launch import is_programmatic
    from rota.engine.row_product import RowTuning

    (outputs, inputs), processors = weight.shape, processors_of(weight.device)
    columns, step, stages, warps = NARROW if outputs < 2 * NARROW[0] * processors else WIDE
    if inputs % step or not is_programmatic(weight.device):
        return None
    shares = max(1, processors * columns // outputs)
    return RowTuning(columns=columns, shares=shares, step=step, stages=stages, warps=warps)


def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _milliseconds(rows: int, weights: Sequence[Tensor], way: Way) -> float:
    x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
    return graph_milliseconds([partial(way, x, weight) for weight in weights])
