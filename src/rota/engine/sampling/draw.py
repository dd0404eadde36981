"""A draw turns weighted tokens and one uniform number per row into tokens, each row by itself.

The uniform number is a hash of the request's seed and the token's index. The draw inverts the cumulative weights in
vocabulary order. So a request's tokens depend only on its own logits, seed and parameters: not on the other requests
in the batch, nor on how often the request was preempted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rota.core.plan import NO_TOKEN

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; as signed numbers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """[n] float32 in [0, 1), the `indices`-th number of each seed's stream; seeds [n] int64."""
    mixed = mix(seeds + indices.to(torch.int64) * GOLDEN)
    return _shift(mixed, 40).to(torch.float32) * 2.0**-24


def mix(bits: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of the argument; int64 arithmetic wraps around."""
    bits = (bits ^ _shift(bits, 30)) * FIRST
    bits = (bits ^ _shift(bits, 27)) * SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros instead of the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def choose(
    logits: Tensor, best: Tensor, rows: Tensor, indices: Tensor, parameters: Tensor, seeds: Tensor, has_filters: bool
) -> Tensor:
    """[n] int64: drawn tokens where the temperature is above zero, and the best tokens elsewhere.

    logits [n, vocabulary] float32; best [n] int64, the largest logit's token; rows [n] of the requests; indices [n] of
    the new tokens in their requests. By row: seeds, mixed; parameters, of which four are read: temperature, top_k,
    top_p, min_p. Without `has_filters` only the temperature is read.
    """
    temperature, top_k, top_p, min_p = parameters[rows, :4].unbind(1)
    is_greedy = temperature == 0.0
    divisor = temperature.where(~is_greedy, 1.0)
    weights = ((logits - logits.gather(1, best[:, None])) / divisor[:, None]).exp_()
    if has_filters:
        weights = weights.where(weights >= cutoff(weights, top_k, top_p, min_p), 0.0)
    return torch.where(is_greedy, best, draw(weights, uniform(seeds[rows], indices), best))


def draw(weights: Tensor, uniforms: Tensor, fallback: Tensor) -> Tensor:
    """[n] int64: token i with a probability in proportion to weights[:, i]; weights [n, vocabulary].

    A GPU's cumulative sum is not quite monotone, so rounding can select a token of weight zero, or one past the last.
    That happens about once in a million draws; then the row's `fallback` is taken.
    """
    cumulative = weights.cumsum(-1)
    targets = (uniforms * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=weights.shape[1] - 1)
    return torch.where(weights.gather(1, tokens) > 0, tokens, fallback[:, None])[:, 0]


def cutoff(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[n, 1]: the smallest weight that stays; weights [n, vocabulary] with a largest weight of 1, the rest [n].

    Top-k first, then top-p among the rest, then min-p relative to the largest weight: the usual order. Tokens as likely
    as the last token that stays, stay too: the order of ties must not decide.
    """
    ascending = sort_values(weights)
    cumulative = ascending.cumsum(-1)
    everything = cumulative[:, -1:]
    smallest = ascending.gather(1, weights.shape[1] - top_k.to(torch.int64)[:, None])
    # A token stays while the mass above it is less than the nucleus; with top_p = 1 no rounding removes a token.
    nucleus = top_p[:, None] * (everything - _mass_below(smallest, ascending, cumulative))
    below = (everything - nucleus).where(top_p[:, None] < 1.0, -1.0)
    first = torch.searchsorted(cumulative, below, right=True).clamp_(max=weights.shape[1] - 1)
    return torch.maximum(torch.maximum(smallest, ascending.gather(1, first)), min_p[:, None])


def _mass_below(limit: Tensor, ascending: Tensor, cumulative: Tensor) -> Tensor:
    """[n, 1]: the sum of a row's weights smaller than its limit."""
    first = torch.searchsorted(ascending, limit)
    return cumulative.gather(1, (first - 1).clamp(min=0)).where(first > 0, 0.0)


def keep_top_sigmas(logits: Tensor, sigmas: Tensor) -> Tensor:
    """New logits: minus infinity for those that lie further below the largest than so many standard deviations.

    logits [n, vocabulary]; sigmas [n], 0 keeps all. What is impossible already counts neither for the mean nor for the
    deviation.
    """
    is_possible = logits > -torch.inf
    counts = is_possible.sum(-1, keepdim=True)
    possible = logits.where(is_possible, 0.0)
    means = possible.sum(-1, keepdim=True) / counts
    deviations = ((logits - means).where(is_possible, 0.0).square().sum(-1, keepdim=True) / counts).sqrt()
    limits = logits.amax(-1, keepdim=True) - sigmas[:, None] * deviations
    return logits.masked_fill((logits < limits) & (sigmas > 0)[:, None], -torch.inf)


def argmax(values: Tensor) -> Tensor:
    """[n] int64, the first largest value of each row. NumPy is 20 times as fast as torch on a CPU (49152 floats)."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.float().numpy().argmax(-1))
    return values.argmax(-1)


def mask_nan_rows(tokens: Tensor, logits: Tensor) -> Tensor:
    """The tokens chosen from the logits; NO_TOKEN where logits are not numbers, since no choice means anything.

    The largest value of a row is NaN if any value is. The operations are few and small, and none copies a number from
    the host: a captured graph runs this in every step.
    """
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens.masked_fill(chosen - chosen != 0.0, NO_TOKEN)


def sort_values(values: Tensor) -> Tensor:
    """Rows in ascending order. NumPy's sort is 20 times as fast as torch's on a CPU with AVX-512."""
    if values.device.type == "cpu":
        ordered = values.numpy().copy()
        ordered.sort(-1)
        return torch.from_numpy(ordered)
    return values.sort(-1).values
