"""Decode attention reads each row's cache once, in parallel shares whose results are combined afterwards.

    row's tokens   0 .................................. length
    splits         |--- share ---|--- share ---|- rest -|          share: a multiple of TILE

A program serves one (row, kv head, split) for all query heads of the group, so keys and values leave memory
once. Decode is bound by that reading; the arithmetic hides behind it on tensor cores, with the few query heads
padded to the 16 rows a matrix instruction takes.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from rota.engine.attention.triton_tile import absorb, load_tile, locate


@triton.jit
def _share(length, splits, TILE: tl.constexpr):
    """Tokens per split. From the length on the device: a captured graph serves rows of any length."""
    return tl.cdiv(tl.cdiv(length, splits), TILE) * TILE


@triton.jit
def _read_share(
    begin,
    end,
    q,  # [GROUP_TILE, DIMS]
    keys,
    values,
    table,
    scale,
    page_stride,
    token_stride,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The running softmax (top, total, mixed) over the keys and values [begin, end)."""
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
        top, total, mixed = absorb(q, k, v, inside[None, :], top, total, mixed, scale, True)
    return top, total, mixed


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tables", "rows", "lengths"])
def decode_kernel(
    query,  # -> [decodes, heads, head_dim]
    keys,  # -> [blocks, kv_heads, block_size, head_dim]
    values,
    tables,  # -> [rows + 1, pages] int32
    rows,  # -> [decodes] int32
    lengths,  # -> [decodes] int32
    output,  # -> [decodes, heads, head_dim], or with SPLIT [decodes, heads, splits, head_dim] float32
    logs,  # -> with SPLIT [decodes, heads, splits] float32: log2 of each split's softmax denominator
    scale,
    splits,
    query_stride,
    query_head_stride,
    page_stride,
    head_stride,
    token_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    GROUP_TILE: tl.constexpr,  # GROUP padded to what tl.dot takes
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,  # what tl.dot multiplies
):
    # Splits vary slowest: those a short row leaves empty come last and end at once.
    kv_head, decode, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + decode)
    share = _share(length, splits, TILE)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if (split > 0) & (begin >= length):  # split 0 always writes: zeros for a padded row of length 0
        return

    in_group = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIMS)
    heads = kv_head * GROUP + in_group
    is_real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query + decode * query_stride + q_offsets, mask=is_real, other=0.0).to(OPERAND)
    table = tables + tl.load(rows + decode) * table_stride

    top, total, mixed = _read_share(
        begin, end, q, keys + kv_head * head_stride, values + kv_head * head_stride, table, scale,
        page_stride, token_stride, GROUP_TILE, HEAD_DIM, DIMS, BLOCK_SIZE, TILE, OPERAND,
    )  # fmt: skip
    denominator = tl.where(total > 0, total, 1.0)
    mixed = mixed / denominator[:, None]
    if SPLIT:
        places = (decode * HEADS + heads) * splits + split
        tl.store(logs + places, top + tl.log2(denominator), mask=in_group < GROUP)
    else:
        places = decode * HEADS + heads
    pointers = output + places[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
    tl.store(pointers, mixed.to(output.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def combine_kernel(
    partial,  # -> [decodes, heads, splits, head_dim] float32
    logs,  # -> [decodes, heads, splits] float32
    lengths,  # -> [decodes] int32
    output,  # -> [decodes, heads, head_dim]
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, or the next power of two
    TILE: tl.constexpr,
):
    """Weigh the shares of one (row, head) by their softmax denominators; empty splits wrote nothing."""
    head, decode = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + decode)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIMS)
    is_used = (split < splits) & (split * _share(length, splits, TILE) < length)

    place = (decode * HEADS + head).to(tl.int64)
    # Finite where nothing was written: a row of length 0 has no split at all, and -inf - -inf would be NaN.
    log = tl.load(logs + place * splits + split, mask=is_used, other=-1.0e30)
    weights = tl.where(is_used, tl.exp2(log - tl.max(log, 0)), 0.0)
    pointers = partial + (place * splits + split)[:, None] * HEAD_DIM + dims[None, :]
    shares = tl.load(pointers, mask=is_used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    mixed = tl.sum(shares * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + place * HEAD_DIM + dims, mixed.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
