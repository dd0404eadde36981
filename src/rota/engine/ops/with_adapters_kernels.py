"""Operations behind a product that add the adapters' part themselves: `expand` and the next kernel in one launch.

    silu_multiply       program (columns of gate and of up, tile of tokens)
    rotate_and_store    program (head, tile of tokens)
    add_rms_norm        program (token): a norm needs all columns of its row, so each row reads its adapter's whole B

Sums stay in float32 until the operation has ended.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.ops.kernels import in_eight_bits, normed_heads, store_heads, store_row, turned
from rota.engine.programmatic_launch import follow

# ── adding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# What adapters add, computed inside another kernel: `expand` without its loads and stores of y.
#
# Tiles of tokens are those of `expand`, whose tokens all have one slot. Behind them come tiles of 16 neighbours, which
# take the base model's tokens among them.


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
    """Which ranks stand in x @ A.T: in a fused LoRA A all, in shares those up to a matrix instruction's size."""
    if BY_TOKEN:
        return nth < MAX_RANK
    else:
        return (nth < (rank + 15) // 16 * 16) & (nth < MAX_RANK)


@triton.jit
def gain_bias_at(gain_bias, slot, column, mask, OUTPUTS: tl.constexpr, GAIN_BIAS: tl.constexpr):
    """A slot's gain and shift of these columns; where the mask is false they change nothing."""
    if GAIN_BIAS:
        at = gain_bias + slot * GAIN_BIAS + column
        return tl.load(at, mask=mask, other=1.0), tl.load(at + OUTPUTS, mask=mask, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def with_gain_bias(y, gain, shift, GAIN_BIAS: tl.constexpr):
    """y as gains and biases leave it (lora/gain_bias.py), or as it is where slots have none."""
    if GAIN_BIAS:
        return y * gain + shift
    else:
        return y


# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernels.
_ANYWHERE = ["order", "token_slots", "tile_slots", "tile_starts", "tile_counts", "ranks", "positions", "addresses"]
_NUMBERS = ["tokens", "tiles", "slots"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def silu_multiply_kernel(
    y,  # -> [tokens, 2 * WIDTH]
    b,  # -> [slots, MAX_RANK, 2 * WIDTH]
    ranks,  # -> [slots] int32
    gain_bias,  # -> [slots, gains and shifts, 2 * WIDTH] float32, or None
    order, token_slots, tile_slots, tile_starts, tile_counts,
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
    GAIN_BIAS: tl.constexpr,  # numbers from a slot's gains and biases to the next slot's; 0: there are none
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    follow(PROGRAMMATIC)
    slot, rank, place, token, is_token, count = look_up(
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
    s_at = shrunk_at(shrunk, place[:, None], token[:, None], slot, row_stride, 2, MAX_RANK, BY_TOKEN)
    b_at = b + slot * (MAX_RANK * 2 * WIDTH) + column
    is_adapted = inside & (tl.program_id(1) < tiles)
    gate_gain, gate_shift = gain_bias_at(gain_bias, slot, column, is_adapted, 2 * WIDTH, GAIN_BIAS)
    up_gain, up_shift = gain_bias_at(gain_bias, slot, column + WIDTH, is_adapted, 2 * WIDTH, GAIN_BIAS)
    to_gate, to_up = added(
        s_at, b_at, is_token, is_adapted, rank, tokens * (2 * MAX_RANK), MAX_RANK,
        MAX_RANK, WIDTH, 2 * WIDTH, SHARES, RANKS, OPERAND, BY_TOKEN,
    )  # fmt: skip
    gate = with_gain_bias(gate.to(tl.float32) + to_gate, gate_gain, gate_shift, GAIN_BIAS)
    up = with_gain_bias(up.to(tl.float32) + to_up, up_gain, up_shift, GAIN_BIAS)
    result = (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty)
    tl.store(output + token[:, None] * WIDTH + column, result, mask=is_real)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def rotate_and_store_kernel(
    y,  # -> [tokens, (HEADS + 2 * KV_HEADS) * head_dim]
    b,  # -> [slots, MAX_RANK, the same]
    ranks,
    gain_bias,  # -> [slots, gains and shifts, the same] float32, or None
    order, token_slots, tile_slots, tile_starts, tile_counts,
    shrunk,  # -> [SHARES, tokens in their order, 3 * MAX_RANK]; BY_TOKEN: [tokens, slots, 3 * MAX_RANK]
    # As in `kernels.rotate_and_store_kernel`:
    rotary, positions, addresses, query, keys, values, scales, query_norm, key_norm, epsilon,
    tokens, tiles, slots, y_stride, row_stride, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr, OPERAND: tl.constexpr, BY_TOKEN: tl.constexpr, GAIN_BIAS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """One head of a tile's tokens, in halves, because a rotation turns pairs."""
    follow(PROGRAMMATIC)
    slot, rank, place, token, is_token, count = look_up(
        tl.program_id(1), order, token_slots, tile_slots, tile_starts, tile_counts, ranks, tokens, tiles, slots, TILE
    )
    if count == 0:
        return
    address, position = _of_tokens(addresses, token, is_token), _of_tokens(positions, token, is_token)
    head, pair = tl.program_id(0), tl.arange(0, HALF_TILE)
    is_pair = (pair < HALF)[None, :]
    is_real = is_token[:, None] & is_pair

    column = head * (2 * HALF) + pair[None, :]
    y_at = y + token[:, None] * y_stride + column
    low = tl.load(y_at, mask=is_real, other=0.0)  # [TILE, HALF_TILE]
    high = tl.load(y_at + HALF, mask=is_real, other=0.0)
    part = (head >= HEADS).to(tl.int32) + (head >= HEADS + KV_HEADS).to(tl.int32)
    s_at = shrunk_at(shrunk, place[:, None], token[:, None], slot, row_stride, 3, MAX_RANK, BY_TOKEN) + part * MAX_RANK
    OUTPUTS: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    is_adapted = is_pair & (tl.program_id(1) < tiles)
    low_gain, low_shift = gain_bias_at(gain_bias, slot, column, is_adapted, OUTPUTS, GAIN_BIAS)
    high_gain, high_shift = gain_bias_at(gain_bias, slot, column + HALF, is_adapted, OUTPUTS, GAIN_BIAS)
    to_low, to_high = added(
        s_at, b + slot * (MAX_RANK * OUTPUTS) + column, is_token, is_adapted, rank,
        tokens * (3 * MAX_RANK), MAX_RANK, 0, HALF, OUTPUTS, SHARES, RANKS, OPERAND, BY_TOKEN,
    )  # fmt: skip
    low = with_gain_bias(low.to(tl.float32) + to_low, low_gain, low_shift, GAIN_BIAS)
    high = with_gain_bias(high.to(tl.float32) + to_high, high_gain, high_shift, GAIN_BIAS)

    turns = part < 2
    if NORMS:
        low, high = normed_heads(low, high, query_norm, key_norm, epsilon, pair, part == 0, turns, HALF)
    angles = rotary + position[:, None] * (2 * HALF) + pair[None, :]
    low, high = turned(low, high, angles, turns, is_real, query.dtype.element_ty, HALF)

    store_heads(query + head * (2 * HALF), token, pair, low, high, is_token & (part == 0), HEADS * 2 * HALF, HALF)
    kv_head, page, nth = (head - HEADS) % KV_HEADS, address // BLOCK_SIZE, address % BLOCK_SIZE
    if scales is not None:
        low, high, sizes = in_eight_bits(low, high, keys.dtype.element_ty)
        line = (page * KV_HEADS + kv_head) * BLOCK_SIZE + nth
        tl.store(scales + 2 * line + part - 1, sizes, mask=is_token & (part > 0))
    at = page * page_stride + nth * token_stride
    store_heads(keys + kv_head * head_stride, at, pair, low, high, is_token & (part == 1), 1, HALF)
    store_heads(values + kv_head * head_stride, at, pair, low, high, is_token & (part == 2), 1, HALF)


@triton.jit
def _of_tokens(numbers, token, is_token):
    return tl.load(numbers + token, mask=is_token, other=0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ANYWHERE)
def add_rms_norm_kernel(
    y,  # -> [tokens, WIDTH]
    b,  # -> [slots, MAX_RANK, WIDTH]
    ranks,
    gain_bias,  # -> [slots, gains and shifts, WIDTH] float32, or None
    order, token_slots,
    shrunk,  # -> [SHARES, tokens in their order, MAX_RANK]; BY_TOKEN: [tokens, slots, MAX_RANK]
    residual,  # -> [tokens, WIDTH], becomes the sum
    weight,  # -> [WIDTH]
    output,  # -> [tokens, WIDTH]
    codes,  # -> [tokens, WIDTH], the same in eight bits as `kernels.py` writes them; None: not wanted
    scales,  # -> [tokens] float32
    epsilon, tokens, slots, y_stride, row_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr, RANKS: tl.constexpr,
    BY_TOKEN: tl.constexpr, IS_SMALL: tl.constexpr,  # whether a slot is read whole
    GAIN_BIAS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    is_real = column < WIDTH
    # Here, not where it is used: a norm's weights come from memory, and behind the sum their way would be waited for.
    scale = tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    follow(PROGRAMMATIC)
    place = tl.program_id(0)
    token = place.to(tl.int64)
    if not BY_TOKEN:
        token = tl.load(order + place).to(tl.int64)
    slot = tl.load(token_slots + token).to(tl.int64)
    has_adapter = slot < slots
    rank = tl.load(ranks + slot, mask=has_adapter, other=0)
    row = tl.load(y + token * y_stride + column, mask=is_real, other=0.0).to(tl.float32)
    residual_at = residual + token * WIDTH + column
    beside = tl.load(residual_at, mask=is_real, other=0.0).to(tl.float32)
    gain, shift = gain_bias_at(gain_bias, slot, column, is_real & has_adapter, WIDTH, GAIN_BIAS)
    if not GAIN_BIAS:
        row += beside

    nth = tl.arange(0, RANKS)
    s_at = shrunk_at(shrunk, place, token, slot, row_stride, 1, MAX_RANK, BY_TOKEN)
    b_at = b + slot * (MAX_RANK * WIDTH) + column[None, :]
    total = tl.zeros([COLUMNS], tl.float32)
    # A small slot is read whole, before its rank is known: zeros are beyond it.
    for _ in range(0, MAX_RANK if IS_SMALL else rank, RANKS):
        is_rank = has_adapter & (nth < MAX_RANK if IS_SMALL else nth < rank)
        some = tl.load(b_at + nth[:, None] * WIDTH, mask=is_rank[:, None] & is_real[None, :], other=0.0)
        s = summed(s_at + nth, is_rank, tokens * MAX_RANK, SHARES)
        total += tl.sum(some.to(tl.float32) * s[:, None], 0)
        nth += RANKS
    row = with_gain_bias(row + tl.where(rank > 0, total, 0.0), gain, shift, GAIN_BIAS)
    if GAIN_BIAS:
        row += beside

    # The norm sees the sum as later layers will see it: rounded.
    rounded = row.to(residual.dtype.element_ty)
    tl.store(residual_at, rounded, mask=is_real)
    row = rounded.to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon) * scale
    store_row(normed, output, codes, scales, token, column, is_real, WIDTH, COLUMNS, MOST, LEAST)
