"""Operations behind a product that add the adapters' part themselves: `expand` and the next kernel in one launch.

    silu_multiply       program (columns of gate and of up, tile of tokens)
    rotate_and_store    program (head, tile of tokens)
    add_rms_norm        program (token): a norm needs all columns of its row, so each row reads its adapter's whole B

Tiles of tokens are those of `expand`, whose tokens all have one slot. Behind them come tiles of 16 neighbours, which
take the base model's tokens among them. Sums stay in float32 until the operation has ended.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.ops.fused_kernels import by_kind, in_eight_bits, store_heads, turned

# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernels.
_ANYWHERE = ["order", "token_slots", "tile_slots", "tile_starts", "tile_counts", "ranks", "positions", "addresses"]
_NUMBERS = ["tokens", "tiles", "slots"]


@triton.jit
def _look_up(
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
def _shrunk_at(
    shrunk, place, token, slot, row_stride, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BY_TOKEN: tl.constexpr
):
    """Where a token's x @ A.T begins."""
    if BY_TOKEN:
        return shrunk + token * row_stride + slot * (PARTS * MAX_RANK)
    else:
        return shrunk + place * (PARTS * MAX_RANK)


@triton.jit
def _summed(s_at, mask, share_stride, SHARES: tl.constexpr):
    """The shares of x @ A.T, added in their order."""
    s = tl.load(s_at, mask=mask, other=0.0).to(tl.float32)
    # Not a static_range: in an unrolled sum the compiler would move each share through shared memory separately.
    for share in range(1, SHARES):
        s += tl.load(s_at + share * share_stride, mask=mask, other=0.0)
    return s


@triton.jit
def _added(
    s_at,  # [TILE, 1] pointers
    b_at,  # [1, COLUMNS] pointers
    is_token,
    inside,
    rank,
    share_stride,
    MAX_RANK: tl.constexpr,
    S_APART: tl.constexpr,  # from the first set's x @ A.T to the second's
    B_APART: tl.constexpr,  # from the first set's columns to the second's
    OUTPUTS: tl.constexpr,
    SHARES: tl.constexpr,
    RANKS: tl.constexpr,  # ranks per iteration
    OPERAND: tl.constexpr,
):
    """What adapters add to two sets of columns, whose loads are on their way together."""
    TILE: tl.constexpr = s_at.shape[0]
    COLUMNS: tl.constexpr = b_at.shape[1]
    first = tl.zeros([TILE, COLUMNS], tl.float32)
    second = tl.zeros([TILE, COLUMNS], tl.float32)
    nth = tl.arange(0, RANKS)
    for _ in range(0, rank, RANKS):
        at = b_at + nth[:, None] * OUTPUTS
        is_rank = nth < rank
        b_first = tl.load(at, mask=is_rank[:, None] & inside, other=0.0).to(OPERAND)
        b_second = tl.load(at + B_APART, mask=is_rank[:, None] & inside, other=0.0).to(OPERAND)
        # Up to a multiple of every matrix instruction's size there are numbers: four of them can move at a time.
        is_stored = is_token[:, None] & ((nth < (rank + 15) // 16 * 16) & (nth < MAX_RANK))[None, :]
        s = _summed(s_at + nth[None, :], is_stored, share_stride, SHARES).to(OPERAND)
        first = tl.dot(s, b_first, first, input_precision="ieee")
        if S_APART > 0:
            s = _summed(s_at + S_APART + nth[None, :], is_stored, share_stride, SHARES).to(OPERAND)
        second = tl.dot(s, b_second, second, input_precision="ieee")
        nth += RANKS
    return first, second


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def silu_multiply_kernel(
    y,  # -> [tokens, 2 * WIDTH]
    b,  # -> [slots, MAX_RANK, 2 * WIDTH]
    ranks,  # -> [slots] int32
    order,
    token_slots,
    tile_slots,
    tile_starts,
    tile_counts,
    shrunk,  # -> [SHARES, tokens in their order, 2 * MAX_RANK]; BY_TOKEN: [tokens, slots, 2 * MAX_RANK]
    output,  # -> [tokens, WIDTH]
    tokens,
    tiles,
    slots,
    y_stride,
    row_stride,  # of shrunk, BY_TOKEN
    WIDTH: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    OPERAND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    slot, rank, place, token, is_token, count = _look_up(
        tl.program_id(1), order, token_slots, tile_slots, tile_starts, tile_counts, ranks, tokens, tiles, slots, TILE
    )
    if count == 0:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < WIDTH
    is_real = is_token[:, None] & inside
    y_at = y + token[:, None] * y_stride + column
    gate = tl.load(y_at, mask=is_real, other=0.0)
    up = tl.load(y_at + WIDTH, mask=is_real, other=0.0)
    s_at = _shrunk_at(shrunk, place[:, None], token[:, None], slot, row_stride, 2, MAX_RANK, BY_TOKEN)
    b_at = b + slot * (MAX_RANK * 2 * WIDTH) + column
    to_gate, to_up = _added(
        s_at,
        b_at,
        is_token,
        inside,
        rank,
        tokens * (2 * MAX_RANK),
        MAX_RANK,
        MAX_RANK,
        WIDTH,
        2 * WIDTH,
        SHARES,
        RANKS,
        OPERAND,
    )
    gate, up = gate.to(tl.float32) + to_gate, up.to(tl.float32) + to_up
    result = (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty)
    tl.store(output + token[:, None] * WIDTH + column, result, mask=is_real)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def rotate_and_store_kernel(
    y,  # -> [tokens, (HEADS + 2 * KV_HEADS) * head_dim]
    b,  # -> [slots, MAX_RANK, the same]
    ranks,
    order,
    token_slots,
    tile_slots,
    tile_starts,
    tile_counts,
    shrunk,  # -> [SHARES, tokens in their order, 3 * MAX_RANK]; BY_TOKEN: [tokens, slots, 3 * MAX_RANK]
    rotary,  # from here on as in `fused_kernels.rotate_and_store_kernel`
    positions,
    addresses,
    query,
    keys,
    values,
    scales,
    query_norm,
    key_norm,
    epsilon,
    tokens,
    tiles,
    slots,
    y_stride,
    row_stride,
    page_stride,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    OPERAND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    """One head of a tile's tokens, in halves, because a rotation turns pairs."""
    slot, rank, place, token, is_token, count = _look_up(
        tl.program_id(1), order, token_slots, tile_slots, tile_starts, tile_counts, ranks, tokens, tiles, slots, TILE
    )
    if count == 0:
        return
    head = tl.program_id(0)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    part = (head >= HEADS).to(tl.int32) + is_value.to(tl.int32)
    pair = tl.arange(0, HALF_TILE)
    is_pair = (pair < HALF)[None, :]
    is_real = is_token[:, None] & is_pair

    column = head * (2 * HALF) + pair[None, :]
    y_at = y + token[:, None] * y_stride + column
    low = tl.load(y_at, mask=is_real, other=0.0)  # [TILE, HALF_TILE]
    high = tl.load(y_at + HALF, mask=is_real, other=0.0)
    s_at = _shrunk_at(shrunk, place[:, None], token[:, None], slot, row_stride, 3, MAX_RANK, BY_TOKEN) + part * MAX_RANK
    OUTPUTS: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    b_at = b + slot * (MAX_RANK * OUTPUTS) + column
    to_low, to_high = _added(
        s_at, b_at, is_token, is_pair, rank, tokens * (3 * MAX_RANK), MAX_RANK, 0, HALF, OUTPUTS, SHARES, RANKS, OPERAND
    )
    low, high = low.to(tl.float32) + to_low, high.to(tl.float32) + to_high

    turns = head < HEADS + KV_HEADS
    if NORMS:
        shrink = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + epsilon)[:, None]
        low_weight = by_kind(query_norm, key_norm, pair[None, :], is_query, is_pair)
        high_weight = by_kind(query_norm, key_norm, HALF + pair[None, :], is_query, is_pair)
        low = tl.where(turns, low * shrink * low_weight, low)
        high = tl.where(turns, high * shrink * high_weight, high)

    angles = rotary + tl.load(positions + token, mask=is_token, other=0)[:, None] * (2 * HALF) + pair[None, :]
    low, high = turned(low, high, angles, turns, is_real, query.dtype.element_ty, HALF)

    store_heads(query + head * (2 * HALF), token, pair, low, high, is_token & is_query, HEADS * 2 * HALF, HALF)
    address = tl.load(addresses + token, mask=is_token, other=0)
    at = (address // BLOCK_SIZE) * page_stride + (address % BLOCK_SIZE) * token_stride
    nth = (head - HEADS) % KV_HEADS
    if scales is not None:
        low, high, sizes = in_eight_bits(low, high, keys.dtype.element_ty)
        line = ((address // BLOCK_SIZE) * KV_HEADS + nth) * BLOCK_SIZE + address % BLOCK_SIZE
        tl.store(scales + 2 * line + is_value.to(tl.int32), sizes, mask=is_token & (head >= HEADS))
    store_heads(keys + nth * head_stride, at, pair, low, high, is_token & is_key, 1, HALF)
    store_heads(values + nth * head_stride, at, pair, low, high, is_token & is_value, 1, HALF)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def add_rms_norm_kernel(
    y,  # -> [tokens, WIDTH]
    b,  # -> [slots, MAX_RANK, WIDTH]
    ranks,
    order,
    token_slots,
    shrunk,  # -> [SHARES, tokens in their order, MAX_RANK]; BY_TOKEN: [tokens, slots, MAX_RANK]
    residual,  # -> [tokens, WIDTH], becomes the sum
    weight,  # -> [WIDTH]
    output,  # -> [tokens, WIDTH]
    epsilon,
    tokens,
    slots,
    y_stride,
    row_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SHARES: tl.constexpr,
    RANKS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    place = tl.program_id(0)
    token = tl.load(order + place).to(tl.int64)
    slot = tl.load(token_slots + token).to(tl.int64)
    rank = tl.load(ranks + slot, mask=slot < slots, other=0)
    column = tl.arange(0, COLUMNS)
    is_real = column < WIDTH
    row = tl.load(y + token * y_stride + column, mask=is_real, other=0.0).to(tl.float32)
    residual_at = residual + token * WIDTH + column
    row += tl.load(residual_at, mask=is_real, other=0.0).to(tl.float32)

    nth = tl.arange(0, RANKS)
    s_at = _shrunk_at(shrunk, place, token, slot, row_stride, 1, MAX_RANK, BY_TOKEN)
    b_at = b + slot * (MAX_RANK * WIDTH) + column[None, :]
    for _ in range(0, rank, RANKS):
        is_rank = nth < rank
        some = tl.load(b_at + nth[:, None] * WIDTH, mask=is_rank[:, None] & is_real[None, :], other=0.0)
        s = _summed(s_at + nth, is_rank, tokens * MAX_RANK, SHARES)
        row += tl.sum(some.to(tl.float32) * s[:, None], 0)
        nth += RANKS

    # The norm sees the sum as later layers will see it: rounded.
    rounded = row.to(residual.dtype.element_ty)
    tl.store(residual_at, rounded, mask=is_real)
    row = rounded.to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    normed *= tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    tl.store(output + token * WIDTH + column, normed.to(output.dtype.element_ty), mask=is_real)
