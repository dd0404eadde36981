"""Draws, masks and biases as one Triton launch each, a program per row; twins of the plain versions."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.sampling.masks import Masks, RowMasks
from rota.engine.sampling.restrictions import Biases

# ── triton biases ───────────────────────────────────────────────────────────────────────────────────────────────────
# Biases as one Triton launch, a program per row; the twin of `restrictions.add_biases`.


def add_biases(logits: Tensor, rows: Tensor, biases: Biases) -> None:
    """As `restrictions.add_biases`."""
    most = biases.tokens.shape[1]
    assert logits.stride(1) == 1
    _add_kernel[(len(logits),)](
        logits, rows, biases.counts, biases.tokens, biases.values,
        logits.stride(0), biases.counts.stride(0), most, TILE=triton.next_power_of_2(most),
    )  # fmt: skip


# A step's inputs may lie anywhere in a larger buffer, and so may counts.
@triton.jit(do_not_specialize_on_alignment=["rows", "counts"])
def _add_kernel(
    logits,  # -> [count, vocabulary] float32, changed
    rows,  # -> [count] int32
    counts,  # -> [rows] float32
    tokens,  # -> [rows, most] int64
    values,  # -> [rows, most] float32
    logits_stride,
    counts_stride,
    most,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    offsets = tl.arange(0, TILE)
    is_own = offsets < tl.load(counts + row * counts_stride)
    token = tl.load(tokens + row * most + offsets, mask=is_own, other=0)
    value = tl.load(values + row * most + offsets, mask=is_own, other=0.0)
    target = logits + place * logits_stride + token
    tl.store(target, tl.load(target, mask=is_own) + value, mask=is_own)


# ── triton masks ────────────────────────────────────────────────────────────────────────────────────────────────────
# Masks as one Triton launch; the twin of `masks.mask_logits`.

LARGEST_MASK_TILE = 4096


def mask_logits(logits: Tensor, masks: Masks | None, limits: RowMasks | None) -> Tensor:
    """As `masks.mask_logits`."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == 1
    masked = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    tile = min(LARGEST_MASK_TILE, triton.next_power_of_2(vocabulary))
    # What a step does not have is not read; any tensor stands in for it.
    lines, bits = (masks.lines, masks.bits) if masks is not None else (masked, masked)
    rows, lengths, scopes, limit_bits = (
        (limits.rows, limits.lengths, limits.scopes, limits.bits) if limits is not None else (masked,) * 4
    )
    _mask_kernel[(count, triton.cdiv(vocabulary, tile))](
        logits, masked, lines, bits, rows, lengths, scopes, limit_bits,
        vocabulary, logits.stride(0), triton.cdiv(vocabulary, 32), scopes.stride(0),
        MASKS=masks is not None, LIMITS=limits is not None, TILE=tile,
    )  # fmt: skip
    return masked


# Lines and bits lie in one buffer, where the number of rows decides about their alignment; so do a step's inputs.
@triton.jit(do_not_specialize_on_alignment=["lines", "bits", "rows", "lengths", "scopes"])
def _mask_kernel(
    logits,  # -> [count, vocabulary]
    masked,  # -> [count, vocabulary] float32, written
    lines,  # -> [count] int32
    bits,  # -> [lines, words] int32
    rows,  # -> [count] int32
    lengths,  # -> [count] int32
    scopes,  # -> [rows, 2] float32
    limit_bits,  # -> [rows, 2, words] int32
    vocabulary,
    logits_stride,
    words,
    scopes_stride,
    MASKS: tl.constexpr,
    LIMITS: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_inside = offsets < vocabulary
    values = tl.load(logits + place * logits_stride + offsets, mask=is_inside).to(tl.float32)
    if MASKS:
        line = tl.load(lines + place).to(tl.int64)
        if line >= 0:
            values = _masked(values, bits + line * words, offsets, is_inside)
    if LIMITS:
        row = tl.load(rows + place).to(tl.int64)
        has_mask = tl.load(scopes + row * scopes_stride)
        until = tl.load(scopes + row * scopes_stride + 1)
        is_early = tl.load(lengths + place) < until
        if is_early:
            values = _masked(values, limit_bits + row * 2 * words, offsets, is_inside)
        elif has_mask > 0.0:
            values = _masked(values, limit_bits + (row * 2 + 1) * words, offsets, is_inside)
    tl.store(masked + place * vocabulary + offsets, values, mask=is_inside)


@triton.jit
def _masked(values, line, offsets, is_inside):
    """Values of the tokens whose bit is set, and minus infinity."""
    words = tl.load(line + offsets // 32, mask=is_inside, other=0)
    return tl.where((words >> (offsets % 32)) & 1 != 0, values, float("-inf"))


# ── triton draw ─────────────────────────────────────────────────────────────────────────────────────────────────────
# The draw as one Triton launch, a program per row; the twin of `draw.choose`.
#
# To sort a vocabulary for top-k and top-p takes a GPU longer than the rest of sampling. But a row fits into the cache,
# so the program bisects for the cut. Positive floats are ordered like their bits read as integers: thirty halvings of
# [0, 1] find the exact weight at which a count or a mass is reached.

LARGEST_TILE = 8192


def choose(
    logits: Tensor, best: Tensor, rows: Tensor, indices: Tensor, parameters: Tensor, seeds: Tensor, has_filters: bool
) -> Tensor:
    """As `draw.choose`."""
    count, vocabulary = logits.shape
    assert logits.stride(1) == parameters.stride(1) == 1
    tokens = torch.empty_like(best)
    tile = min(LARGEST_TILE, triton.next_power_of_2(vocabulary))
    _choose_kernel[(count,)](
        logits, best, rows, indices, parameters, seeds, tokens, vocabulary, logits.stride(0), parameters.stride(0),
        FILTERS=has_filters, TILE=tile, num_warps=max(4, tile // 512),
    )  # fmt: skip
    return tokens


# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["rows", "indices"])
def _choose_kernel(
    logits,  # -> [count, vocabulary] float32
    best,  # -> [count] int64
    rows,  # -> [count] int32
    indices,  # -> [count] int32
    parameters,  # -> [rows, 4 or more] float32: temperature, top_k, top_p, min_p
    seeds,  # -> [rows] int64
    tokens,  # -> [count] int64, written
    vocabulary,
    logits_stride,
    parameters_stride,
    FILTERS: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    fallback = tl.load(best + place)
    parameters += row * parameters_stride
    temperature = tl.load(parameters)
    if temperature == 0.0:
        tl.store(tokens + place, fallback)
        return
    line = logits + place * logits_stride
    highest = tl.load(line + fallback)
    scale = 1.4426950408889634 / temperature  # weights as powers of two: the hardware has exp2

    smallest = 0.0
    if FILTERS:
        top_k, top_p, min_p = tl.load(parameters + 1), tl.load(parameters + 2), tl.load(parameters + 3)
        if top_k < vocabulary:
            smallest = _bisect(line, highest, scale, vocabulary, 0.0, top_k, False, TILE)
        if top_p < 1.0:
            nucleus = top_p * _total(line, highest, scale, vocabulary, smallest, True, TILE)
            smallest = _bisect(line, highest, scale, vocabulary, smallest, nucleus, True, TILE)
        smallest = tl.maximum(smallest, min_p)

    chance = _uniform(tl.load(seeds + row), tl.load(indices + place))
    target = chance * _total(line, highest, scale, vocabulary, smallest, True, TILE)
    reached = 0.0
    first = vocabulary
    for start in range(0, vocabulary, TILE):
        weights = _weights(line, highest, scale, vocabulary, smallest, start, TILE)
        passes = (reached + tl.cumsum(weights, 0) > target) & (weights > 0)
        first = tl.minimum(first, tl.min(tl.where(passes, start + tl.arange(0, TILE), vocabulary), 0))
        reached += tl.sum(weights, 0)
    # Sum and cumulative sum round differently: about once in a million draws no token passes the target.
    tl.store(tokens + place, tl.where(first < vocabulary, first, fallback))


@triton.jit
def _uniform(seed, index):
    """As `draw.uniform`."""
    bits = seed.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    return (bits >> 40).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24


@triton.jit
def _weights(line, highest, scale, vocabulary, smallest, start, TILE: tl.constexpr):
    """[TILE] weights of the tokens from `start` on, 1 for the likeliest token; zero below `smallest`."""
    offsets = start + tl.arange(0, TILE)
    values = tl.load(line + offsets, mask=offsets < vocabulary, other=float("-inf"))
    weights = tl.exp2((values - highest) * scale)
    return tl.where(weights >= smallest, weights, 0.0)


@triton.jit
def _total(line, highest, scale, vocabulary, smallest, MASS: tl.constexpr, TILE: tl.constexpr):
    """The mass, or without MASS the number, of the tokens whose weight is at least `smallest`."""
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocabulary, TILE):
        weights = _weights(line, highest, scale, vocabulary, smallest, start, TILE)
        if MASS:
            total += weights
        else:
            total += (weights > 0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _bisect(line, highest, scale, vocabulary, smallest, enough, MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest weight, at least `smallest`, such that it and all larger weights are enough."""
    low = tl.full([], 0, tl.int32)  # bits of a weight that leaves enough
    high = tl.full([], 0x3F800001, tl.int32)  # bits of the next number after 1, which leaves nothing
    for _ in range(30):
        middle = low + (high - low) // 2
        limit = tl.maximum(smallest, middle.to(tl.float32, bitcast=True))
        is_enough = _total(line, highest, scale, vocabulary, limit, MASS, TILE) >= enough
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return tl.maximum(smallest, low.to(tl.float32, bitcast=True))
