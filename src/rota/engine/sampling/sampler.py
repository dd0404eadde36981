"""The sampler chooses one token for each row from its logits, all rows at once, by each request's parameters.

Parameters lie in device tensors, one line for each row, written when a sequence takes the row. The host keeps a few
flags for each row, so that a step does only what its rows need: usually an argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rota.core.plan import Seat
from rota.core.request import MAX_LOGIT_BIASES, SamplingParams
from rota.engine.device import send
from rota.engine.sampling.draw import argmax, choose, keep_top_sigmas, mix
from rota.engine.sampling.guides import needs_guide
from rota.engine.sampling.masks import MaskLogits, Masks, RowMasks, mask_logits, words_of
from rota.engine.sampling.restrictions import (
    AddBiases,
    Biases,
    Restrictions,
    add_biases,
    has_limits,
    has_mask,
    least_tokens,
)
from rota.engine.step.results import Logprobs, Sampled

# ── penalties ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Penalties count the prompt and output tokens of a row, and make them less likely.


class Penalties:
    """Counts of every row's tokens, on the device; they take no memory until a request has a penalty.

    A row without penalties multiplies by one and subtracts zero, whatever its counts. So counts are kept and cleared
    only for rows with penalties.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._size = (rows, vocabulary)
        self._device = device
        self._in_prompt: Tensor | None = None  # [rows, vocabulary] bool
        self._written: Tensor | None = None  # [rows, vocabulary] int32

    def seat(self, seat: Seat) -> None:
        """Count the prompt and the output so far; a preempted sequence already has output."""
        in_prompt, written = self._tables()
        tokens = send(np.array(seat.tokens, dtype=np.int64), self._device)
        prompt, output = tokens[: seat.prompt_length], tokens[seat.prompt_length :]
        in_prompt[seat.row].zero_().index_fill_(0, prompt, True)
        written[seat.row].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
        """New logits: repetition as Hugging Face defines it, then presence and frequency as OpenAI defines them.

        `factors` [n, 3] are the three in this order.
        """
        in_prompt, written = self._tables()
        repetition, presence, frequency = factors[:, :, None].unbind(1)
        counts = written[rows]
        was_written = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_prompt[rows] | was_written, repeated, logits)
        return logits - counts * frequency - was_written * presence

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Remember the tokens just chosen; rows are all different."""
        _, written = self._tables()
        places = rows.to(torch.int64) * self._size[1] + tokens
        written.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._in_prompt is None or self._written is None:
            self._in_prompt = torch.zeros(self._size, dtype=torch.bool, device=self._device)
            self._written = torch.zeros(self._size, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._written


# A line of parameters. A float32 counts exactly up to 2**24, more than any vocabulary.
COLUMNS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition", "presence", "frequency"),
    *("has_mask", "until"),
    *("biases", "top_n_sigma"),
)
PENALTY_COLUMNS, SCOPE_COLUMNS, BIAS_COLUMN, SIGMA_COLUMN = slice(4, 7), slice(7, 9), 9, 10

# What a row may need beyond an argmax, as bits: plain integers, because a step tests them many times.
CHANCE, FILTERS, PENALTIES, LOGPROBS, GUIDE, LIMITS, BIAS, SIGMA = (1 << bit for bit in range(8))

Choose = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


class Sampler:
    """Sampling parameters of every row, and the choice itself."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device, draws: bool = True) -> None:
        """A rank that does not draw only remembers what rows need."""
        self._draws = draws
        self._device = device
        self._vocabulary = vocabulary
        self._parameters = torch.zeros(rows, len(COLUMNS), dtype=torch.float32, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._choose, self._mask, self._add_biases = _kernels(device)
        self._penalties = Penalties(rows, vocabulary, device)
        self._restrictions = Restrictions(rows, vocabulary, device)
        self._needs: NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        # How many top tokens a row wants log-probabilities of, if it wants any.
        self._logprobs: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)

    def seat(self, seats: Sequence[Seat]) -> None:
        """Write the parameters of new sequences to their rows."""
        rows = np.array([seat.row for seat in seats], dtype=np.int64)
        params = [seat.sampling for seat in seats]
        self._needs[rows] = [_needs_of(p) for p in params]
        self._logprobs[rows] = [p.logprobs or 0 for p in params]
        if not self._draws:
            return
        seeds = torch.tensor([_seed_of(p) for p in params])
        # Mixed, because neighbouring seeds must not give neighbouring streams.
        places, seeds = send(np.stack([rows, mix(seeds).numpy()]), self._device)
        self._seeds[places] = seeds
        self._parameters[places] = send(np.array([self._line_of(seat) for seat in seats], np.float32), self._device)
        for seat in seats:
            if seat.sampling.has_penalties:
                self._penalties.seat(seat)
            self._restrictions.seat(seat)

    def needs(self, rows: NDArray[np.integer]) -> int:
        """What a step over these rows needs, all rows together; 0 means that an argmax is enough."""
        return int(np.bitwise_or.reduce(self._needs[rows]))

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        indices: Tensor,
        host_rows: NDArray[np.integer],
        masks: Masks | None = None,
    ) -> Sampled:
        """Choose tokens; logits [n, vocabulary] stay unchanged, `indices` [n] are the new tokens' positions."""
        needs = self.needs(host_rows)
        if not needs:
            return Sampled(argmax(logits))
        weighed = self._weighed(logits, rows, indices, host_rows, masks)
        tokens = argmax(weighed)
        is_stuck = None
        if needs & (GUIDE | LIMITS):
            is_stuck = weighed.gather(1, tokens[:, None])[:, 0] == -torch.inf
        if needs & CHANCE:
            has_filters = bool(needs & FILTERS)
            tokens = self._choose(weighed, tokens, rows, indices, self._parameters, self._seeds, has_filters)
        if needs & PENALTIES:
            self._penalties.count(rows, tokens)
        logprobs = self._logprobs_of(logits.float(), tokens, host_rows) if needs & LOGPROBS else None
        return Sampled(tokens, logprobs, is_stuck=is_stuck)

    def _weighed(
        self, logits: Tensor, rows: Tensor, lengths: Tensor, host_rows: NDArray[np.integer], masks: Masks | None
    ) -> Tensor:
        """The logits as the requests want them, in float32: with biases, then penalties, and without what may not come.

        Masks come first: minus infinity stays what it is, and a mask writes new logits, to which biases can be added.
        """
        needs, lines = self.needs(host_rows), self._parameters
        if masks is not None or needs & LIMITS:
            limits = self._restrictions.limits(rows, lengths, lines[:, SCOPE_COLUMNS]) if needs & LIMITS else None
            logits = self._mask(logits, masks, limits)
        else:
            logits = logits.to(torch.float32, copy=bool(needs & BIAS))
        if needs & BIAS:
            self._add_biases(logits, rows, self._restrictions.biases(lines[:, BIAS_COLUMN]))
        if needs & PENALTIES:
            logits = self._penalties.apply(logits, rows, lines[rows, PENALTY_COLUMNS])
        if needs & SIGMA:
            logits = keep_top_sigmas(logits, lines[rows, SIGMA_COLUMN])
        return logits

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what masks and biases need, so that no request waits for it; `dtype` is that of logits."""
        ones = torch.ones(1, dtype=torch.int32, device=self._device)
        bits = ones.expand(2 * words_of(self._vocabulary)).contiguous().view(1, 2, -1)
        masks = Masks(ones - 1, bits[:, 0])
        limits = RowMasks(ones - 1, ones, self._parameters[:, SCOPE_COLUMNS], bits)
        logits = torch.zeros(1, self._vocabulary, dtype=dtype, device=self._device)
        for kinds in ((masks, None), (None, limits), (masks, limits)):
            masked = self._mask(logits, *kinds)
        nothing = torch.zeros(1, MAX_LOGIT_BIASES, device=self._device)
        biases = Biases(self._parameters[:, BIAS_COLUMN], nothing.to(torch.int64), nothing)
        self._add_biases(masked, ones - 1, biases)

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, host_rows: NDArray[np.integer]) -> Logprobs:
        positions = np.flatnonzero(self._needs[host_rows] & LOGPROBS)
        counts = self._logprobs[host_rows[positions]]
        wanted = tuple(zip(positions.tolist(), counts.tolist(), strict=True))
        return Logprobs(*logprobs_of(logits, tokens, int(counts.max())), wanted)

    def _line_of(self, seat: Seat) -> tuple[float, ...]:
        params = seat.sampling
        top_k = self._vocabulary if params.top_k is None else min(params.top_k, self._vocabulary)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        least = least_tokens(params)
        until = seat.prompt_length + least if least else 0
        others = (has_mask(params), until, len(params.logit_bias), params.top_n_sigma or 0.0)
        return (params.temperature, float(top_k), params.top_p, params.min_p, *penalties, *others)


def logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n] log-probabilities of the tokens, [n, most] the likeliest tokens, [n, most] their log-probabilities."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - total
    top = logits.topk(most, dim=-1)
    return chosen[:, 0], top.indices, top.values - total


def _kernels(device: torch.device) -> tuple[Choose, MaskLogits, AddBiases]:
    if device.type != "cuda":
        return choose, mask_logits, add_biases
    # Imported here: Triton is installed only where PyTorch has a GPU.
    from rota.engine.sampling import triton_sampling

    return triton_sampling.choose, triton_sampling.mask_logits, triton_sampling.add_biases


def _seed_of(params: SamplingParams) -> int:
    if params.is_greedy:
        return 0
    assert params.seed is not None, "a request that samples is given its seed where the request is made"
    return params.seed


def _needs_of(params: SamplingParams) -> int:
    needs = 0
    if not params.is_greedy:
        needs |= CHANCE
        if params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0:
            needs |= FILTERS
    if params.has_penalties:
        needs |= PENALTIES
    if params.logprobs is not None:
        needs |= LOGPROBS
    if needs_guide(params):
        needs |= GUIDE
    if has_limits(params):
        needs |= LIMITS
    if params.logit_bias:
        needs |= BIAS
    if params.top_n_sigma is not None and not params.is_greedy:
        needs |= SIGMA
    return needs
