"""The kernels of the small operations: each reads its inputs once, computes in float32 and rounds once, at the end."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.layer_cache import LARGEST_CODE, SMALLEST_SCALE
from rota.engine.programmatic_launch import follow
from rota.engine.quantised.scaled_product import in_words

_LARGEST_CODE, _SMALLEST_SCALE = tl.constexpr(LARGEST_CODE), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def rms_norm_kernel(
    x,  # -> [tokens, WIDTH]
    residual,  # -> [tokens, WIDTH]; with ADD becomes x + residual
    weight,  # -> [WIDTH]
    output,  # -> [tokens, WIDTH], may be x
    codes,  # -> [tokens, WIDTH] float8_e4m3fn, in the order of words (`quantised/packing.py`); None: not wanted
    scales,  # -> [tokens] float32, of the codes
    epsilon,
    x_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_real = columns < WIDTH
    # What is needed late is loaded early: 0.04 to 0.2 ms of a step on an H200, with the rotation's (decision 0023).
    if PROGRAMMATIC:  # no forerunner writes it
        scale = tl.load(weight + columns, mask=is_real, other=0.0)
    follow(PROGRAMMATIC)
    row = tl.load(x + token * x_stride + columns, mask=is_real, other=0.0).to(tl.float32)
    if not PROGRAMMATIC:  # before the threads wait for each other's sums
        scale = tl.load(weight + columns, mask=is_real, other=0.0)
    if ADD:
        pointers = residual + token * WIDTH + columns
        row += tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
        # The norm sees the sum as later layers will see it: rounded.
        rounded = row.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=is_real)
        row = rounded.to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    normed *= scale.to(tl.float32)
    store_row(normed, output, codes, scales, token, columns, is_real, WIDTH, COLUMNS, MOST, LEAST)


@triton.jit
def silu_multiply_kernel(
    gate_up,  # -> [tokens, 2 * WIDTH]
    output,  # -> [tokens, WIDTH]
    codes,  # as of the norm; a program with codes has its whole row
    scales,
    gate_up_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    follow(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    if codes is None:
        columns = tl.program_id(1) * COLUMNS + columns
    is_real = columns < WIDTH
    pointers = gate_up + token * gate_up_stride + columns
    gate = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(pointers + WIDTH, mask=is_real, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    store_row(product, output, codes, scales, token, columns, is_real, WIDTH, COLUMNS, MOST, LEAST)


@triton.jit
def store_row(
    numbers, output, codes, scales, token, columns, is_real,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """A row in 16 bits, and the codes of what was written where they are wanted."""
    kept = numbers.to(output.dtype.element_ty)
    tl.store(output + token * WIDTH + columns, kept, mask=is_real)
    if codes is not None:
        ordered, scale = in_words(kept.to(tl.float32), COLUMNS, MOST, LEAST)
        tl.store(codes + token * WIDTH + columns, ordered.to(codes.dtype.element_ty), mask=is_real)
        tl.store(scales + token, scale)


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(do_not_specialize_on_alignment=["positions", "addresses"])
def rotate_and_store_kernel(
    qkv,  # -> [tokens, (HEADS + 2 * KV_HEADS) * head_dim]
    rotary,  # -> [positions, 2 * HALF] float32, cosines then sines
    positions,  # -> [tokens] int64
    addresses,  # -> [tokens] int64
    query,  # -> [tokens, HEADS, head_dim]
    keys,  # -> [blocks, KV_HEADS, BLOCK_SIZE, head_dim]
    values,
    scales,  # -> [blocks, KV_HEADS, BLOCK_SIZE, 2] float32; None: keys and values keep the query's precision
    query_norm,  # -> [head_dim], read only with NORMS
    key_norm,
    epsilon,
    qkv_stride,
    page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,  # HALF, or the next power of two
    BLOCK_SIZE: tl.constexpr, HEADS_TILE: tl.constexpr, NORMS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """One token, HEADS_TILE of its heads, whatever they are; each head in halves, because a rotation turns pairs.

    heads   q0 q1 ... | k0 k1 ... | v0 v1 ...        a head   [ low half | high half ]
            norm, rotate            copy                        x_i  with  x_(i + HALF)
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    pair = tl.arange(0, HALF_TILE)
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    is_pair = (pair < HALF)[None, :]
    turns = (is_query | is_key)[:, None]
    address = tl.load(addresses + token)  # before the first store, which a later load may not pass
    follow(PROGRAMMATIC)

    pointers = qkv + token * qkv_stride + head[:, None] * (2 * HALF) + pair[None, :]
    is_real = (is_query | is_key | is_value)[:, None] & is_pair
    low = tl.load(pointers, mask=is_real, other=0.0).to(tl.float32)  # [HEADS_TILE, HALF_TILE]
    high = tl.load(pointers + HALF, mask=is_real, other=0.0).to(tl.float32)

    if NORMS:
        low, high = normed_heads(low, high, query_norm, key_norm, epsilon, pair, is_query[:, None], turns, HALF)
    angles = rotary + tl.load(positions + token) * (2 * HALF) + pair[None, :]
    low, high = turned(low, high, angles, turns, is_pair, query.dtype.element_ty, HALF)

    store_heads(query + token * HEADS * (2 * HALF), head, pair, low, high, is_query, 2 * HALF, HALF)
    at = (address // BLOCK_SIZE) * page_stride + (address % BLOCK_SIZE) * token_stride
    if scales is not None:
        low, high, sizes = in_eight_bits(low, high, keys.dtype.element_ty)
        _store_scales(scales, sizes, address, head - HEADS, KV_HEADS, BLOCK_SIZE)
    store_heads(keys + at, head - HEADS, pair, low, high, is_key, head_stride, HALF)
    store_heads(values + at, head - HEADS - KV_HEADS, pair, low, high, is_value, head_stride, HALF)


@triton.jit
def normed_heads(low, high, query_norm, key_norm, epsilon, pair, is_query, turns, HALF: tl.constexpr):
    """Both halves of heads under their norms; values have none."""
    is_pair = (pair < HALF)[None, :]
    shrink = tl.rsqrt(tl.sum(low * low + high * high, 1) / (2 * HALF) + epsilon)[:, None]
    low_weight = _by_kind(query_norm, key_norm, pair[None, :], is_query, is_pair)
    high_weight = _by_kind(query_norm, key_norm, HALF + pair[None, :], is_query, is_pair)
    return tl.where(turns, low * shrink * low_weight, low), tl.where(turns, high * shrink * high_weight, high)


@triton.jit
def turned(low, high, angles, turns, is_pair, DTYPE: tl.constexpr, HALF: tl.constexpr):
    """Both halves, rotated where a head turns and rounded; values turn by no angle."""
    cosine = tl.where(turns, tl.load(angles, mask=is_pair, other=0.0), 1.0)
    sine = tl.where(turns, tl.load(angles + HALF, mask=is_pair, other=0.0), 0.0)
    return (low * cosine - high * sine).to(DTYPE), (high * cosine + low * sine).to(DTYPE)


@triton.jit
def in_eight_bits(low, high, DTYPE: tl.constexpr):
    """Codes of both halves and each head's scale, as in `layer_cache.in_eight_bits`."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    largest = tl.max(tl.maximum(_size(low), _size(high)), 1)
    scales = tl.where(largest == 0.0, 1.0, tl.maximum(largest / _LARGEST_CODE, _SMALLEST_SCALE))
    # Whatever became of its codes: a vector that is not finite is not a number.
    scales = tl.where(largest == float("inf"), float("nan"), scales)
    return (low / scales[:, None]).to(DTYPE), (high / scales[:, None]).to(DTYPE), scales


@triton.jit
def _store_scales(scales, sizes, address, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Heads count from the first key's; a value's scale lies behind its key's."""
    place = ((address // BLOCK_SIZE) * KV_HEADS + head % KV_HEADS) * BLOCK_SIZE + address % BLOCK_SIZE
    tl.store(scales + 2 * place + head // KV_HEADS, sizes, mask=(head >= 0) & (head < 2 * KV_HEADS))


@triton.jit
def _size(x):
    """Absolute values, infinite also where x is not a number: a maximum would skip that one."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def store_heads(target, head, pair, low, high, is_mine, stride, HALF: tl.constexpr):
    """Write both halves of some heads, each at its place."""
    pointers = target + head[:, None] * stride + pair[None, :]
    mask = is_mine[:, None] & (pair < HALF)[None, :]
    tl.store(pointers, low, mask=mask)
    tl.store(pointers + HALF, high, mask=mask)


@triton.jit
def _by_kind(query_norm, key_norm, dims, is_query, is_pair):
    """[HEADS_TILE, HALF_TILE] norm weights, the query's or the key's."""
    of_query = tl.load(query_norm + dims, mask=is_pair, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + dims, mask=is_pair, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)
