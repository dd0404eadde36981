"""Prefill attention: each chunk's queries attend to the cached prefix and causally to their own chunk.

A program takes QUERIES packed rows: the query heads of one kv head lie beside each other, token after token, so
that a short chunk still fills a tile and a block spans few tokens, which keeps the causal edge narrow.

    packed row       0    1    2    3    4    5   ...        (GROUP = 3)
    token, head     0,0  0,1  0,2  1,0  1,1  1,2

    keys             low ......... edge ........... clear ....... high
    this block's      window: masked | all queries see | edge: masked |  nothing to see, never visited

A block that reads far more keys than its fair share, as a short chunk behind a long cached prefix does, is cut: several
programs read pieces of its keys, and `combine_kernel` puts their results together.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.attention.triton_shares import block_span, entry_of
from rota.engine.attention.triton_tile import (
    absorb,
    combine,
    load_scales,
    load_tile,
    locate,
    log_total,
    operands,
    settled,
)

# Packed rows of one unit that a program combines, and pieces at a time: their numbers are in its registers.
COMBINED_ROWS = 8
AT_ONCE = tl.constexpr(8)


@triton.jit
def _sweep(
    begin,
    end,
    q,  # [QUERIES, DIMS]
    last_seen,  # [QUERIES] the last key position each query attends to: its own
    window,
    top,
    total,
    mixed,
    keys,
    values,
    scales,
    table,
    scale,
    page_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Absorb the keys [begin, end), whole tiles unless MASKED."""
    positions = begin + tl.arange(0, TILE)
    at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        inside = positions < end
        visible = positions[None, :] <= last_seen[:, None]
        if WINDOWED:
            visible &= positions[None, :] > last_seen[:, None] - window
        k = load_tile(keys, at, inside, HEAD_DIM, DIMS, MASKED).to(OPERAND)
        v = load_tile(values, at, inside, HEAD_DIM, DIMS, MASKED).to(OPERAND)
        k_scales, v_scales = load_scales(scales, at, inside, HEAD_DIM, MASKED)
        positions += TILE
        at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
        top, total, mixed = absorb(
            q, k, v, k_scales, v_scales, visible, top, total, mixed, scale, scales is not None, MASKED, MASKED
        )
    return top, total, mixed


@triton.jit
def _attend(
    q,  # [QUERIES, DIMS]
    last_seen,  # see `_sweep`
    start,  # of the chunk
    length,
    block,
    begin,
    end,
    window,
    keys,
    values,
    scales,
    table,
    scale,
    page_stride,
    token_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Absorb the keys [begin, end) of one block of a chunk's queries, with a mask only where one is needed."""
    # Tiles are counted from `low`, in pieces too.
    low, high = block_span(start, length, block, window, GROUP, QUERIES)
    clear = low + (start + block * QUERIES // GROUP + 1 - low) // TILE * TILE
    q, scale = operands(q, scale, scales, OPERAND)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIMS], tl.float32)
    if WINDOWED:
        # From here on the block's last query sees every key too.
        edge = low + tl.cdiv(tl.maximum(high - window - low, 0), TILE) * TILE
        top, total, mixed = _sweep(
            begin, tl.minimum(end, edge), q, last_seen, window, top, total, mixed, keys, values, scales,
            table, scale, page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
            True, True, OPERAND,
        )  # fmt: skip
        begin = tl.maximum(begin, edge)
        clear = tl.maximum(clear, edge)
    top, total, mixed = _sweep(
        begin, tl.minimum(end, clear), q, last_seen, window, top, total, mixed, keys, values, scales,
        table, scale, page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
        False, False, OPERAND,
    )  # fmt: skip
    top, total, mixed = _sweep(
        tl.maximum(begin, clear), end, q, last_seen, window, top, total, mixed, keys, values, scales,
        table, scale, page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
        True, WINDOWED, OPERAND,
    )  # fmt: skip
    return top, total, settled(mixed, total)  # in its piece a query may see nothing


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(
    do_not_specialize=["window"], do_not_specialize_on_alignment=["tables", "shares", "rows", "starts", "offsets"]
)
def prefill_kernel(
    query,  # -> [prefill tokens, heads, head_dim]
    keys,  # -> [blocks, kv_heads, block_size, head_dim]
    values,
    scales,  # -> [blocks, kv_heads, block_size, 2] float32; None: keys and values are in the model's precision
    tables,  # -> [rows + 1, pages] int32
    shares,  # -> the list of `share_chunks`
    rows,  # -> [chunks] int32
    starts,  # -> [chunks] int32
    offsets,  # -> [chunks + 1] int32
    output,  # -> [prefill tokens, heads, head_dim]
    partial,  # -> [pieces, kv_heads, QUERIES, head_dim] float32
    logs,  # -> [pieces, kv_heads, QUERIES] float32: log2 of each piece's softmax denominators
    scale,
    window,
    query_stride,
    query_head_stride,
    page_stride,
    head_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    kv_head, index = tl.program_id(0), tl.program_id(1)
    count = tl.load(shares)
    chunk, block, begin, end, _, pieces, slot = entry_of(shares, index)
    if index >= count:
        return
    first_query = tl.load(offsets + chunk)
    length = tl.load(offsets + chunk + 1) - first_query
    start = tl.load(starts + chunk)
    packed, dims = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, DIMS)
    token, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    is_real = (token < length)[:, None] & (dims < HEAD_DIM)[None, :]
    query_row = (first_query + token).to(tl.int64)
    q_offsets = query_row * query_stride + head * query_head_stride
    q = tl.load(query + q_offsets[:, None] + dims[None, :], mask=is_real, other=0.0)
    table = tables + tl.load(rows + chunk) * table_stride
    keys, values = keys + kv_head * head_stride, values + kv_head * head_stride
    if scales is not None:
        scales += 2 * kv_head * BLOCK_SIZE
    top, total, mixed = _attend(
        q, start + token, start, length, block, begin, end, window, keys, values, scales, table, scale, page_stride,
        token_stride, GROUP, HEAD_DIM, DIMS, BLOCK_SIZE, QUERIES, TILE, WINDOWED, OPERAND,
    )  # fmt: skip
    if pieces == 1:
        out_offsets = (query_row * HEADS + head) * HEAD_DIM
        tl.store(output + out_offsets[:, None] + dims[None, :], mixed.to(output.dtype.element_ty), mask=is_real)
    else:
        place = (slot * (HEADS // GROUP) + kv_head) * QUERIES + tl.arange(0, QUERIES)
        tl.store(partial + place[:, None].to(tl.int64) * HEAD_DIM + dims[None, :], mixed, mask=is_real)
        tl.store(logs + place, log_total(top, total), mask=token < length)


@triton.jit(do_not_specialize_on_alignment=["shares", "offsets"])
def combine_kernel(
    shares,  # -> the list of `share_chunks`
    offsets,  # -> [chunks + 1] int32
    output,  # -> [prefill tokens, heads, head_dim]
    partial,  # -> [pieces, kv_heads, QUERIES, head_dim] float32
    logs,  # -> [pieces, kv_heads, QUERIES] float32
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,  # of a unit's packed rows, those of one program
):
    """Weigh the pieces of every cut block by their softmax denominators. Most steps cut none, so programs are few."""
    kv_head, rows = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    cut, first_cut = tl.load(shares + 1), tl.load(shares + 2)
    first = 0
    while first < cut:
        chunk, block, _, _, _, pieces, _ = entry_of(shares, first_cut + first)
        first_query = tl.load(offsets + chunk)
        packed = block * QUERIES + rows
        is_real = packed // GROUP < tl.load(offsets + chunk + 1) - first_query
        places = (first * (HEADS // GROUP) + kv_head) * QUERIES + rows
        stride = (HEADS // GROUP) * QUERIES
        mixed = combine(partial, logs, places, stride, pieces, is_real, ROWS, HEAD_DIM, DIMS, AT_ONCE)
        out = ((first_query + packed // GROUP).to(tl.int64) * HEADS + kv_head * GROUP + packed % GROUP) * HEAD_DIM
        mask = is_real[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(output + out[:, None] + dims[None, :], mixed.to(output.dtype.element_ty), mask=mask)
        first += pieces
