"""A GemmChoice says which of a GPU's libraries computes a product: both are tried, since it depends on the rows.

A product without a bias goes through cuBLAS and one with a bias through cuBLASLt, whose choices of kernels differ.
Llama-8B's `down` on an H200 (2026-11-15), without and with a bias of zeros: 32.0 and 33.5 µs for 16 rows, 35.0 and
32.6 for 64, 38.2 and 34.1 for 112.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# Of fewer rows the first choice is as good. Of more it is so on the whole: all four matrices of a layer took 131.7 and
# 134.3 µs for 128 rows, 179.2 and 179.6 for 256.
FEWEST_ROWS, MOST_ROWS = 24, 128
# Matrices in a round: L2 must not hold the one that is multiplied next.
MOST_MATRICES = 8
ROUNDS = 3
# By how much the second library must be quicker to be taken: more than chance.
WORTH_IT = 0.98


class GemmChoice:
    """What was found out about matrices of one shape; until then, and for other numbers of rows, no bias is added."""

    def __init__(self, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._zeros = torch.zeros(outputs, dtype=dtype, device=device)
        self._with_bias: set[int] = set()

    def bias_for(self, rows: int) -> Tensor | None:
        return self._zeros if rows in self._with_bias else None

    @torch.inference_mode()
    def tune(self, weights: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Try both with so many rows: a few milliseconds for each number."""
        weights = weights[:MOST_MATRICES]
        for count in rows:
            if FEWEST_ROWS <= count <= MOST_ROWS:
                x = torch.ones(count, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
                plain, with_bias = (_milliseconds(x, weights, bias) for bias in (None, self._zeros))
                if with_bias < WORTH_IT * plain:
                    self._with_bias.add(count)


def _milliseconds(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> float:
    """The best of some rounds; as a graph, for launching would take longer than a small product does."""
    functional.linear(x, weights[0], bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            functional.linear(x, weight, bias)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    graph.replay()
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in marks)
