"""Biases are added to the logits of the few tokens that a request names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """By row: tokens, all different, and their biases. What lies behind a row's own is left from others."""

    counts: Tensor  # [rows] float32, how many are the row's own
    tokens: Tensor  # [rows, most] int64
    values: Tensor  # [rows, most] float32


# Logits [n, vocabulary] float32, changed in place; rows [n]; biases.
AddBiases = Callable[[Tensor, Tensor, Biases], None]


def add_biases(logits: Tensor, rows: Tensor, biases: Biases) -> None:
    """As `AddBiases` says."""
    is_own = torch.arange(biases.tokens.shape[1], device=logits.device) < biases.counts[rows, None]
    # Tokens that are not the row's own are tokens all the same, and get nothing.
    logits.scatter_add_(1, biases.tokens[rows], biases.values[rows].where(is_own, 0.0))
