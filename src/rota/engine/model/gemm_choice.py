"""A GemmChoice says which of a GPU's two libraries computes a product, by trying both for each number of rows.

A product without a bias goes through cuBLAS, a product with a bias through cuBLASLt. Their choices of kernels differ.
Llama-8B's `down` on an H200 (2026-11-15), without and with a bias of zeros: 32.0 and 33.5 µs for 16 rows, 35.0 and
32.6 for 64, 38.2 and 34.1 for 112.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rota.core.trials import Choice
from rota.engine.model.timed import graph_milliseconds
from rota.engine.trials import chosen

# For fewer rows cuBLAS is as good. For more rows it is so on the whole: all four matrices of a layer took 131.7 and
# 134.3 µs for 128 rows, 179.2 and 179.6 for 256.
FEWEST_ROWS, MOST_ROWS = 24, 128
# Matrices in a round: L2 must not hold the next matrix.
MOST_MATRICES = 8
# The second library is taken if it needs less than this share of the time: a difference beyond chance.
WORTH_IT = 0.98

PLAIN, WITH_BIAS = (0,), (1,)


class GemmChoice:
    """The choice for matrices of one shape; before `tune`, and for other numbers of rows, no bias is added."""

    def __init__(self, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self._zeros = torch.zeros(outputs, dtype=dtype, device=device)
        self._with_bias: set[int] = set()

    def bias_for(self, rows: int) -> Tensor | None:
        return self._zeros if rows in self._with_bias else None

    @torch.inference_mode()
    def tune(self, weights: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Try both libraries for these numbers of rows: a few milliseconds for each number."""
        outputs, inputs = weights[0].shape
        for count in rows:
            if FEWEST_ROWS <= count <= MOST_ROWS:
                name = f"a bias for {count} rows by {outputs} x {inputs} in {weights[0].dtype}"
                find = partial(self._with_bias_or_not, weights[:MOST_MATRICES], count)
                if chosen(name, find, lambda choice: choice in (PLAIN, WITH_BIAS)) == WITH_BIAS:
                    self._with_bias.add(count)

    def _with_bias_or_not(self, weights: Sequence[Tensor], rows: int) -> Choice:
        x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
        plain, with_bias = (_milliseconds(x, weights, bias) for bias in (None, self._zeros))
        return WITH_BIAS if with_bias < WORTH_IT * plain else PLAIN


def _milliseconds(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> float:
    return graph_milliseconds([partial(functional.linear, x, weight, bias) for weight in weights])
