"""Restrictions are what a request says of single tokens: a bias, and tokens that may not come, or not yet.

They lie on the device, written when a sequence takes its row, and take no memory until a request has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rota.core.plan import Seat
from rota.core.request import MAX_LOGIT_BIASES, SamplingParams
from rota.engine.device import send
from rota.engine.sampling.masks import RowMasks, Words, packed, words_of

# ── biases ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Biases are added to the logits of the few tokens that a request names.


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


class Restrictions:
    """By row: masks, tokens with a bias and their biases."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._device = device
        self._bits: Tensor | None = None  # [rows, 2, words] int32, as in `RowMasks`
        self._biases: tuple[Tensor, Tensor] | None = None  # [rows, most] int64 and float32, as in `Biases`

    def seat(self, seat: Seat) -> None:
        """Write a row's masks and biases, if its request has any; what the row held before is read by nobody."""
        params = seat.sampling
        if has_limits(params):
            if self._bits is None:
                size = (self._rows, 2, words_of(self._vocabulary))
                self._bits = torch.zeros(size, dtype=torch.int32, device=self._device)
            self._bits[seat.row] = send(self._masks(params), self._device)
        if params.logit_bias:
            self._seat_bias(seat.row, params)

    def limits(self, rows: Tensor, lengths: Tensor, scopes: Tensor) -> RowMasks:
        """Of a step's rows, of which at least one has a mask."""
        assert self._bits is not None
        return RowMasks(rows, lengths, scopes, self._bits)

    def biases(self, counts: Tensor) -> Biases:
        """Of all rows, of which at least one has some; `counts` [rows] says how many each has."""
        assert self._biases is not None
        return Biases(counts, *self._biases)

    def _seat_bias(self, row: int, params: SamplingParams) -> None:
        if self._biases is None:
            nothing = torch.zeros(self._rows, MAX_LOGIT_BIASES, device=self._device)
            self._biases = nothing.to(torch.int64), nothing
        tokens, values = self._biases
        own, biases = zip(*params.logit_bias, strict=True)
        tokens[row, : len(own)] = send(np.array(own, np.int64), self._device)
        values[row, : len(own)] = send(np.array(biases, np.float32), self._device)

    def _masks(self, params: SamplingParams) -> Words:
        """[2, words]: for tokens before the request may end, and for those behind."""
        allowed = params.allowed_token_ids
        later = packed(allowed, self._vocabulary) if allowed is not None else ~packed((), self._vocabulary)
        later &= ~packed((word[0] for word in params.bad_words if len(word) == 1), self._vocabulary)
        return np.stack([later & ~packed(params.stop_token_ids, self._vocabulary), later])


def has_limits(params: SamplingParams) -> bool:
    return has_mask(params) or least_tokens(params) > 0


def least_tokens(params: SamplingParams) -> int:
    """Before so many tokens no stop token may come. Under a grammar, which may be complete, a guide sees to it."""
    return 0 if params.grammar is not None else params.min_new_tokens


def has_mask(params: SamplingParams) -> bool:
    """May some tokens never come? Words of several tokens are a guide's."""
    return params.allowed_token_ids is not None or any(len(word) == 1 for word in params.bad_words)
