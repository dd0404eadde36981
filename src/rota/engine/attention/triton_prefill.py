"""Prefill attention: each chunk's queries attend to the cached prefix and causally to their own chunk.

A program takes QUERIES packed rows: the query heads of one kv head lie beside each other, token after token, so
that a short chunk still fills a tile and a block spans few tokens, which keeps the causal edge narrow.

    packed row       0    1    2    3    4    5   ...        (GROUP = 3)
    token, head     0,0  0,1  0,2  1,0  1,1  1,2

    keys             0 ............ clear ....... end
    this block's     all queries see | edge: masked |  nothing to see, never visited
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.attention.triton_tile import absorb, load_tile, locate


@triton.jit
def _sweep(
    begin,
    end,
    q,  # [QUERIES, DIMS]
    last_seen,  # [QUERIES] the last key position each query attends to: its own
    top,
    total,
    mixed,
    keys,
    values,
    table,
    scale,
    page_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Absorb the keys [begin, end); begin is a multiple of TILE, and so is end unless MASKED."""
    positions = begin + tl.arange(0, TILE)
    at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
    for _ in range(begin, end, TILE):
        inside = positions < end
        visible = positions[None, :] <= last_seen[:, None]
        k = load_tile(keys, at, inside, HEAD_DIM, DIMS, MASKED).to(OPERAND)
        v = load_tile(values, at, inside, HEAD_DIM, DIMS, MASKED).to(OPERAND)
        positions += TILE
        at = locate(table, positions, end, page_stride, token_stride, BLOCK_SIZE)
        top, total, mixed = absorb(q, k, v, visible, top, total, mixed, scale, MASKED)
    return top, total, mixed


@triton.jit
def _attend(
    first_end,  # the keys that the first query of the block sees end here
    end,  # the keys that its last query sees end here
    q,  # [QUERIES, DIMS]
    last_seen,  # [QUERIES]
    keys,
    values,
    table,
    scale,
    page_stride,
    token_stride,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The softmax's denominators [QUERIES] and the values weighted by its numerators [QUERIES, DIMS]."""
    clear = first_end // TILE * TILE
    # Every query sees key 0, so after its first tile no `top` is -inf any more, padded queries included.
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIMS], tl.float32)
    top, total, mixed = _sweep(
        0, clear, q, last_seen, top, total, mixed, keys, values, table, scale,
        page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, False, OPERAND,
    )  # fmt: skip
    top, total, mixed = _sweep(
        clear, end, q, last_seen, top, total, mixed, keys, values, table, scale,
        page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, True, OPERAND,
    )  # fmt: skip
    return total, mixed


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(do_not_specialize_on_alignment=["tables", "rows", "starts", "offsets"])
def prefill_kernel(
    query,  # -> [prefill tokens, heads, head_dim]
    keys,  # -> [blocks, kv_heads, block_size, head_dim]
    values,
    tables,  # -> [rows + 1, pages] int32
    rows,  # -> [chunks] int32
    starts,  # -> [chunks] int32
    offsets,  # -> [chunks + 1] int32
    output,  # -> [prefill tokens, heads, head_dim]
    scale,
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
    OPERAND: tl.constexpr,
):
    kv_head, chunk = tl.program_id(0), tl.program_id(1)
    # The last blocks see the most keys; started first, they do not end up running alone.
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    first_query = tl.load(offsets + chunk)
    length = tl.load(offsets + chunk + 1) - first_query
    if block * QUERIES >= length * GROUP:
        return

    start = tl.load(starts + chunk)
    packed = block * QUERIES + tl.arange(0, QUERIES)
    token = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    dims = tl.arange(0, DIMS)
    is_real = (token < length)[:, None] & (dims < HEAD_DIM)[None, :]
    query_row = (first_query + token).to(tl.int64)
    q_offsets = query_row * query_stride + head * query_head_stride
    q = tl.load(query + q_offsets[:, None] + dims[None, :], mask=is_real, other=0.0).to(OPERAND)
    table = tables + tl.load(rows + chunk) * table_stride

    first_token = block * QUERIES // GROUP
    last_token = tl.minimum((block * QUERIES + QUERIES - 1) // GROUP, length - 1)
    total, mixed = _attend(
        start + first_token + 1, start + last_token + 1, q, start + token,
        keys + kv_head * head_stride, values + kv_head * head_stride, table, scale,
        page_stride, token_stride, HEAD_DIM, DIMS, BLOCK_SIZE, QUERIES, TILE, OPERAND,
    )  # fmt: skip
    out_offsets = (query_row * HEADS + head) * HEAD_DIM
    pointers = output + out_offsets[:, None] + dims[None, :]
    tl.store(pointers, (mixed / total[:, None]).to(output.dtype.element_ty), mask=is_real)
