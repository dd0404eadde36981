"""What adapters add, computed inside another kernel: `expand` without its loads and stores of y.

Tiles of tokens are those of `expand`, whose tokens all have one slot. Behind them come tiles of 16 neighbours, which
take the base model's tokens among them.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def look_up(
    tile, order, token_slots, tile_slots, tile_starts, tile_counts, ranks, tokens, tiles, slots, TILE: tl.constexpr
):
    """A tile's slot and rank, its tokens' places in `order`, their indices, which are real, and how many."""
    nth = tl.arange(0, TILE)
    if tile < tiles:
        count = tl.load(tile_counts + tile)
        slot = tl.load(tile_slots + tile)
        rank = tl.where(count > 0, tl.load(ranks + slot), 0)
        place = tl.load(tile_starts + tile) + nth
        is_token = nth < count
        token = tl.load(order + place, mask=is_token, other=0)
    else:
        slot, rank, place = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), nth
        token = (tile - tiles) * TILE + nth
        is_token = tl.load(token_slots + token, mask=token < tokens, other=-1) == slots
        count = tl.sum(is_token.to(tl.int32), 0)
    # A large batch holds more than 2**31 numbers, so offsets need 64 bits.
    return slot.to(tl.int64), rank, place, token.to(tl.int64), is_token, count


@triton.jit
def shrunk_at(
    shrunk, place, token, slot, row_stride, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BY_TOKEN: tl.constexpr
):
    """Where a token's x @ A.T begins."""
    if BY_TOKEN:
        return shrunk + token * row_stride + slot * (PARTS * MAX_RANK)
    else:
        return shrunk + place * (PARTS * MAX_RANK)


@triton.jit
def summed(s_at, mask, share_stride, SHARES: tl.constexpr):
    """The shares of x @ A.T, added in their order."""
    s = tl.load(s_at, mask=mask, other=0.0).to(tl.float32)
    # Not a static_range: in an unrolled sum the compiler would move each share through shared memory separately.
    for share in range(1, SHARES):
        s += tl.load(s_at + share * share_stride, mask=mask, other=0.0)
    return s


@triton.jit
def added(
    s_at,  # [TILE, 1] pointers
    b_at,  # [1, COLUMNS] pointers
    is_token,
    inside,  # [1, COLUMNS], none of a base tile's
    rank,
    share_stride,
    MAX_RANK: tl.constexpr,
    S_APART: tl.constexpr,  # from the first set's x @ A.T to the second's
    B_APART: tl.constexpr,  # from the first set's columns to the second's
    OUTPUTS: tl.constexpr,
    SHARES: tl.constexpr,
    RANKS: tl.constexpr,  # ranks per iteration
    OPERAND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """What adapters add to two sets of columns, whose loads are on their way together."""
    TILE: tl.constexpr = s_at.shape[0]
    COLUMNS: tl.constexpr = b_at.shape[1]
    first = tl.zeros([TILE, COLUMNS], tl.float32)
    second = tl.zeros([TILE, COLUMNS], tl.float32)
    nth = tl.arange(0, RANKS)
    # Before the rank is known, since a bank holds zeros beyond it: each wait for a number takes half a microsecond.
    b_first, b_second = _two_of_b(b_at, nth, nth < MAX_RANK, inside, B_APART, OUTPUTS)
    for _ in range(0, rank, RANKS):
        is_stored = is_token[:, None] & _is_stored(nth, rank, MAX_RANK, BY_TOKEN)[None, :]
        s = summed(s_at + nth[None, :], is_stored, share_stride, SHARES).to(OPERAND)
        first = tl.dot(s, b_first.to(OPERAND), first, input_precision="ieee")
        if S_APART > 0:
            s = summed(s_at + S_APART + nth[None, :], is_stored, share_stride, SHARES).to(OPERAND)
        second = tl.dot(s, b_second.to(OPERAND), second, input_precision="ieee")
        nth += RANKS
        if MAX_RANK > RANKS:
            b_first, b_second = _two_of_b(b_at, nth, nth < rank, inside, B_APART, OUTPUTS)
    return first, second


@triton.jit
def _two_of_b(b_at, nth, is_rank, inside, B_APART: tl.constexpr, OUTPUTS: tl.constexpr):
    """These ranks of B, in both sets of columns."""
    at, mask = b_at + nth[:, None] * OUTPUTS, is_rank[:, None] & inside
    return tl.load(at, mask=mask, other=0.0), tl.load(at + B_APART, mask=mask, other=0.0)


@triton.jit
def _is_stored(nth, rank, MAX_RANK: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Which ranks stand in x @ A.T: in an annex all, in shares those up to a matrix instruction's size."""
    if BY_TOKEN:
        return nth < MAX_RANK
    else:
        return (nth < (rank + 15) // 16 * 16) & (nth < MAX_RANK)


@triton.jit
def trims_at(trims, slot, column, mask, OUTPUTS: tl.constexpr, TRIM: tl.constexpr):
    """A slot's gain and shift of these columns; where the mask is false they change nothing."""
    if TRIM:
        at = trims + slot * TRIM + column
        return tl.load(at, mask=mask, other=1.0), tl.load(at + OUTPUTS, mask=mask, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def trimmed(y, gain, shift, TRIM: tl.constexpr):
    """y as trims leave it (lora/trims.py), or as it is where slots have none."""
    if TRIM:
        return y * gain + shift
    else:
        return y
