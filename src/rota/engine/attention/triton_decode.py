"""Decode attention reads each row's cache once, in shares whose results the last one to end combines.

    row's tokens   0 ........ low .............................. length
                     window's | piece | piece | piece | rest |          a piece: a multiple of TILE

A program serves one (share, kv head) for all query heads of the group, so keys and values leave memory once; then it
takes the next share, if there is one. Decode is bound by that reading; the arithmetic hides behind it on tensor cores,
with the few query heads padded to the 16 rows a matrix instruction takes. A row that is not cut is written by the
program that read it. There are never more programs than run at once: beside programs that
found nothing to do, the others took longer (64 x 2,000 tokens: 138 instead of 124 us).
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.attention.triton_shares import entry_of, next_entry
from rota.engine.attention.triton_tile import (
    absorb,
    combine,
    load_pairs,
    load_scales,
    load_tile,
    locate,
    log_total,
    operands,
    settled,
    weigh,
)
from rota.engine.programmatic_launch import follow

# Pieces that a program combines at a time: with 16 of them it takes 193 registers instead of 128, so that four programs
# and not six run at once on a processor (80 x 600 tokens: 65 instead of 53 us).
AT_ONCE = tl.constexpr(8)
# The same of `combine_heads_kernel`, which does nothing else.
AT_ONCE_APART = tl.constexpr(32)


@triton.jit
def _attend(
    q,  # [GROUP_TILE, DIMS]
    begin, end, keys, values, scales, table, scale, page_stride, token_stride, kv_head,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Absorb the keys [begin, end) of one row, all of which its token sees."""
    if scales is None:
        return _attend_numbers(
            q, begin, end, keys, values, table, scale, page_stride, token_stride,
            GROUP_TILE, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, OPERAND,
        )  # fmt: skip
    else:
        return _attend_codes(
            q, begin, end, keys, values, scales + 2 * kv_head * BLOCK_SIZE, table, scale, page_stride, token_stride,
            GROUP_TILE, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, OPERAND,
        )  # fmt: skip


@triton.jit
def _attend_numbers(
    q, begin, end, keys, values, table, scale, page_stride, token_stride,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """`_attend` to numbers as the model computes them."""
    q = q.to(OPERAND)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    mixed = tl.zeros([GROUP_TILE, DIMS], tl.float32)
    positions = begin + tl.arange(0, TILE)
    at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        inside = positions < end
        k = load_tile(keys, at, inside, HEAD_DIM, DIMS, True).to(OPERAND)
        v = load_tile(values, at, inside, HEAD_DIM, DIMS, True).to(OPERAND)
        positions += TILE
        at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
        top, total, mixed = absorb(
            q, k, v, 0.0, 0.0, inside[None, :], top, total, mixed, scale, False, True, False
        )  # fmt: skip
    return top, total, settled(mixed, total)  # zeros for a padded row of length 0


@triton.jit
def _attend_codes(
    q, begin, end, keys, values, scales, table, scale, page_stride, token_stride,
    GROUP_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """`_attend` to codes in eight bits: values of even and of odd dimensions are summed apart."""
    q, scale = operands(q, scale, scales, OPERAND)
    top = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_TILE], tl.float32)
    even = tl.zeros([GROUP_TILE, DIMS // 2], tl.float32)
    odd = tl.zeros([GROUP_TILE, DIMS // 2], tl.float32)
    positions = begin + tl.arange(0, TILE)
    at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        inside = positions < end
        k = load_tile(keys, at, inside, HEAD_DIM, DIMS, True).to(OPERAND)
        v_even, v_odd = load_pairs(values, at, inside, HEAD_DIM, DIMS, OPERAND)
        k_scales, v_scales = load_scales(scales, at, inside, HEAD_DIM, True)
        positions += TILE
        at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights, fade, top, total = weigh(
            logits, k_scales, v_scales, inside[None, :], top, total, scale, True, True, False
        )
        weights = weights.to(OPERAND)
        even = tl.dot(weights, v_even, even * fade[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * fade[:, None], input_precision="ieee")
    mixed = tl.reshape(tl.join(even, odd), [GROUP_TILE, DIMS])
    return top, total, settled(mixed, total)


@triton.jit
def _is_last(counter, pieces):
    """Count a piece that has ended; if it is its row's last, the counter is left at zero for the next layer."""
    # All threads have stored before one of them counts.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(do_not_specialize=["call"], do_not_specialize_on_alignment=["tables", "shares", "taken"])
def decode_kernel(
    query,  # -> [decodes, heads, head_dim]
    keys,  # -> [blocks, kv_heads, block_size, head_dim]
    values,
    scales,  # -> [blocks, kv_heads, block_size, 2] float32; None: keys and values are in the model's precision
    tables,  # -> [rows + 1, pages] int32
    shares,  # -> the list of `share_decodes`
    taken,  # -> [kv_heads] int32: see `next_entry`
    output,  # -> [decodes, heads, head_dim]
    partial,  # -> [pieces, heads, head_dim] float32
    logs,  # -> [pieces, heads] float32: log2 of each piece's softmax denominator
    ended,  # -> [pieces, kv_heads] int32: of the row whose first piece this is, how many pieces have ended
    scale,
    call,  # how many times the list was used before
    query_stride, query_head_stride, page_stride, head_stride, token_stride, table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    GROUP_TILE: tl.constexpr,  # GROUP padded to what tl.dot takes
    GROUP_ROWS: tl.constexpr,  # GROUP, or the next power of two
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    APART: tl.constexpr,  # `combine_heads_kernel` follows
    OPERAND: tl.constexpr,  # what tl.dot multiplies
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    follow(PROGRAMMATIC)
    kv_head, index = tl.program_id(0), tl.program_id(1)
    in_group, dims = tl.arange(0, GROUP_TILE), tl.arange(0, DIMS)
    heads = kv_head * GROUP + in_group
    is_real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    keys, values = keys + kv_head * head_stride, values + kv_head * head_stride
    # Both at once: a program without a share reads past the list's end, but not past its room.
    count = tl.load(shares)
    decode, row, begin, end, first, pieces, slot = entry_of(shares, index)
    while index < count:
        q_offsets = heads[:, None] * query_head_stride + dims[None, :]
        q = tl.load(query + decode * query_stride + q_offsets, mask=is_real, other=0.0)
        top, total, mixed = _attend(
            q, begin, end, keys, values, scales, tables + row * table_stride, scale, page_stride, token_stride, kv_head,
            GROUP_TILE, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, OPERAND,
        )  # fmt: skip
        if pieces == 1:
            _store_heads(output, decode * HEADS + heads, dims, mixed, is_real, HEAD_DIM)
        else:
            place = slot * HEADS + heads
            _store_heads(partial, place, dims, mixed, is_real, HEAD_DIM)
            tl.store(logs + place, log_total(top, total), mask=in_group < GROUP)
            if not APART:  # noqa: SIM102 - a constexpr: with `and`, the rest would be compiled too
                if _is_last(ended + first * (HEADS // GROUP) + kv_head, pieces):
                    _combine_heads(
                        partial, logs, output, decode, first, pieces, kv_head * GROUP,
                        HEADS, GROUP, GROUP_ROWS, HEAD_DIM, DIMS, AT_ONCE,
                    )  # fmt: skip
        index = next_entry(taken + kv_head, count, call)
        decode, row, begin, end, first, pieces, slot = entry_of(shares, tl.minimum(index, count - 1))


@triton.jit
def combine_heads_kernel(
    ranges,  # -> [units, 2] int32: a row's first piece, how many it has
    output,
    partial,
    logs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Combine the pieces of one (row, head): for few rows, all of which are cut, quicker than their last programs."""
    follow(PROGRAMMATIC)
    head, decode = tl.program_id(0), tl.program_id(1)
    first, pieces = tl.load(ranges + 2 * decode), tl.load(ranges + 2 * decode + 1)
    if pieces > 1:
        _combine_heads(partial, logs, output, decode, first, pieces, head, HEADS, 1, 1, HEAD_DIM, DIMS, AT_ONCE_APART)


@triton.jit
def _combine_heads(
    partial,
    logs,
    output,
    decode,
    first,
    pieces,
    first_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Write the result of GROUP heads of one row, all of whose pieces have ended."""
    in_group = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    heads = first_head + in_group
    is_head = in_group < GROUP
    mixed = combine(partial, logs, first * HEADS + heads, HEADS, pieces, is_head, GROUP_ROWS, HEAD_DIM, DIMS, PIECES)
    is_real = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    _store_heads(output, decode * HEADS + heads, dims, mixed, is_real, HEAD_DIM)


@triton.jit
def _store_heads(target, places, dims, mixed, is_real, HEAD_DIM: tl.constexpr):
    """Write one line of HEAD_DIM numbers for each head, at its place."""
    pointers = target + places[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
    tl.store(pointers, mixed.to(target.dtype.element_ty), mask=is_real)
