"""Tiles of the paged cache join a running softmax, and so do pieces: what the decode and prefill kernels share."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

# Codes in eight bits are multiplied as float16, into which one instruction turns two of them; into bfloat16 it takes
# four. Beside them weights are powers of two with this much more in the exponent: times a value's scale that is what
# float16 holds well, for values of 1e-4 to 1e6 at most.
LIFT = tl.constexpr(4.0)
# Two words of two codes each: $0 gets the lower ones as float16, $1 the upper ones.
SPLIT_PAIRS = tl.constexpr("""{
    .reg .b32 low, high, none; .reg .b16 two;
    prmt.b32 low, $2, 0, 0x4420; mov.b32 {two, _}, low; cvt.rn.f16x2.e4m3x2 $0, two;
    prmt.b32 high, $2, 0, 0x4431; mov.b32 {two, _}, high; cvt.rn.f16x2.e4m3x2 $1, two;
}""")


@triton.jit
def locate(
    table,  # -> int32, the page table of one sequence
    positions,  # [TILE] int32
    end,  # positions from here on do not exist; they lie nowhere
    page_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
):
    """Where the key (and, the caches being twins, the value) of each position lies: [TILE] int64 offsets.

    Every position asks for its page, instead of every page once: neighbours read the same word out of L1, and a
    tile may be of any size. Loops call this one tile ahead and carry the answer: a lookup in the same iteration
    as the loads it feeds would cost the compiler's pipeline half of its stages.
    """
    pages = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
    # A large cache holds more than 2**31 numbers, so offsets need 64 bits.
    return pages.to(tl.int64) * page_stride + (positions % BLOCK_SIZE) * token_stride


@triton.jit
def load_tile(
    cache,  # -> [blocks, kv_heads, block_size, head_dim], moved to one kv head
    offsets,  # [TILE] int64
    inside,  # [TILE] bool; read only when MASKED
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM, or the next power of two
    MASKED: tl.constexpr,
):
    """[TILE, DIMS]; zero where there is no position or no dimension, because 0 * garbage may be NaN."""
    dims = tl.arange(0, DIMS)
    pointers = cache + offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != DIMS:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_scales(
    scales,  # -> [blocks, kv_heads, block_size, 2] float32, moved to one kv head; None: the cache has none
    offsets,  # [TILE] int64, of the vectors in the cache
    inside,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[TILE] of keys and [TILE] of values, which lie as their vectors do; zero where there is no position.

    Offsets go through a sum of one number each, which the compiler does not turn around. Triton 3.6 gives a load of
    fewer numbers than threads the layout of those who use it: each thread of the prefill kernel found and read the
    scales of 16 positions, and not of one, in 942 instructions instead of 511 for a tile.
    """
    if scales is None:
        return 0.0, 0.0  # not None: a function of Triton 3.6 cannot return it
    else:
        of_key = scales + tl.sum((offsets // HEAD_DIM * 2)[:, None], 1)
        if MASKED:
            return tl.load(of_key, mask=inside, other=0.0), tl.load(of_key + 1, mask=inside, other=0.0)
        else:
            return tl.load(of_key), tl.load(of_key + 1)


@triton.jit
def load_pairs(
    cache,  # -> codes as `load_tile` reads them
    offsets,
    inside,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The codes of even and of odd dimensions, [TILE, DIMS / 2] numbers each.

    Two codes are read as one word of 16 bits: words can be turned on their way to the tensor cores. Bytes cannot, and
    were read one by one.
    """
    pair, first = tl.arange(0, DIMS // 2), offsets // 2
    words_of = cache.to(tl.pointer_type(tl.int16), bitcast=True)
    if HEAD_DIM % 16 == 0:  # which the compiler does not see behind a division
        first = tl.multiple_of(first, 8)
    words = tl.load(
        words_of + first[:, None] + pair[None, :],
        mask=inside[:, None] & (pair < HEAD_DIM // 2)[None, :], other=0,
    )  # fmt: skip
    if OPERAND == tl.float16:  # noqa: SIM300 - a parameter
        return tl.inline_asm_elementwise(SPLIT_PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:  # the interpreter has no assembly
        even, odd = (words & 255).to(tl.uint8), ((words >> 8) & 255).to(tl.uint8)
        return (
            even.to(tl.float8e4nv, bitcast=True).to(OPERAND),
            odd.to(tl.float8e4nv, bitcast=True).to(OPERAND),
        )


@triton.jit
def absorb(
    q,  # [ROWS, DIMS]
    k,  # [TILE, DIMS]
    v,  # [TILE, DIMS]
    k_scales,  # [TILE] float32; read only when SCALED
    v_scales,
    visible,  # [ROWS or 1, TILE] bool; read only when MASKED
    top,  # [ROWS] the largest scaled logit so far
    total,  # [ROWS] the sum of 2 ** (logit - top) so far
    mixed,  # [ROWS, DIMS] values weighted the same way
    scale,  # softmax scale * log2(e): the softmax runs on powers of two, which the hardware has. With codes: [ROWS]
    SCALED: tl.constexpr,  # whether k and v are codes in eight bits
    MASKED: tl.constexpr,
    BLIND: tl.constexpr,  # whether a row may have seen nothing so far
):
    """The running softmax (top, total, mixed) after one more tile of keys and values."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, TILE]
    weights, fade, top, total = weigh(logits, k_scales, v_scales, visible, top, total, scale, SCALED, MASKED, BLIND)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return top, total, mixed


@triton.jit
def weigh(
    logits, k_scales, v_scales, visible, top, total, scale,
    SCALED: tl.constexpr, MASKED: tl.constexpr, BLIND: tl.constexpr,
):  # fmt: skip
    """What a tile's values are multiplied by [ROWS, TILE], what earlier ones fade by, and the softmax's new state."""
    if SCALED:
        logits *= k_scales[None, :]
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    # Scaling the maximum instead of every logit lets `logits * scale - top` become one fused multiply-add.
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    base = new_top
    if BLIND:  # -inf - -inf would be NaN
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    # Lifted weights have a lifted sum, and pieces are weighed by sums that are all lifted: nothing is to be undone.
    weights = tl.exp2(logits * (scale[:, None] if SCALED else scale) - (base - LIFT if SCALED else base)[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    if SCALED:
        weights *= v_scales[None, :]
    return weights, fade, new_top, total


@triton.jit
def operands(q, scale, scales, OPERAND: tl.constexpr):
    """Queries [ROWS, DIMS] to be multiplied, and the softmax scale.

    Beside codes each row is divided by its largest number, so that float16 holds it, and has a scale of its own [ROWS].
    """
    if scales is None:
        return q.to(OPERAND), scale
    else:
        q = q.to(tl.float32)
        largest = tl.max(tl.abs(q), 1)
        size = tl.where(largest > 0.0, largest, 1.0)
        return (q / size[:, None]).to(OPERAND), scale * size


@triton.jit
def settled(mixed, total):
    """What a running softmax came to; zeros where nothing was seen."""
    return mixed / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def log_total(top, total):
    """log2 of a running softmax's denominator; -inf where nothing was seen."""
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit
def combine(
    partial,  # -> [.., head_dim] float32: what pieces came to
    logs,  # -> [..] float32: their `log_total`
    places,  # [ROWS] where the first piece's rows lie
    stride,  # from there to the next piece's
    pieces,
    is_real,  # [ROWS] bool
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # pieces whose numbers are in registers
):
    """[ROWS, DIMS]: pieces weighed by their softmax denominators. Read around L1, where old ones may lie."""
    dims = tl.arange(0, DIMS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for begin in range(0, pieces, AT_ONCE):
        piece = begin + tl.arange(0, AT_ONCE)
        at = places[None, :] + (piece * stride)[:, None]
        is_there = (piece < pieces)[:, None] & is_real[None, :]
        log = tl.load(logs + at, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        some = tl.load(
            partial + at[:, :, None].to(tl.int64) * HEAD_DIM + dims[None, None, :],
            mask=is_there[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(log, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(log - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade[:, None] + tl.sum(some * weights[:, :, None], 0)
        top = new_top
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
