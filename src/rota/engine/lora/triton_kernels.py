"""Two kernels apply every adapter of a step at one site: shrink computes x @ A.T in shares, expand adds B's part to y.

    shrink    program (share of the inputs, rows of A, tile)     x[tile] @ A[slot].T   ->  partial[share]
    expand    program (columns of a part, tile)                  sum(partial) @ B[slot]  +=>  y[tile]

All tokens of a tile have one slot, so a program multiplies plain matrices. Slots differ only in a pointer and a rank,
both read on the device. Few tokens make little work, and shares spread it over all processors. The expand kernel adds
the shares: no atomics, no zeroing, the same sum every time.

With pages (PAGE ranks each, pages.py) a slot is a row of a table: one more number is read for each rank, before the
rank's own numbers. Without them (PAGE is 0) nothing is looked up, and the kernels are as if there were no pages.

With trims (trims.py) expand ends with  y = gain · y + shift.  Without them (TRIM is 0) it is as if there were none.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_SMALL_TILE = tl.constexpr(16)


@triton.jit
def _look_up(tile, order, tile_slots, tile_starts, tile_counts, ranks, TILE: tl.constexpr):
    """A tile's slot and rank (0 if unused); its tokens' places in `order`, their indices, and which are real."""
    count = tl.load(tile_counts + tile)
    slot = tl.load(tile_slots + tile)
    place = tl.load(tile_starts + tile) + tl.arange(0, TILE)
    is_token = tl.arange(0, TILE) < count
    # A large batch holds more than 2**31 numbers, so offsets need 64 bits.
    token = tl.load(order + place, mask=is_token, other=0).to(tl.int64)
    rank = tl.where(count > 0, tl.load(ranks + slot), 0)
    return slot.to(tl.int64), rank, place, token, is_token


@triton.jit
def _padded(rank):
    """A multiple of every matrix instruction's size: a mask that ends there lets four numbers move at a time."""
    return (rank + 15) // 16 * 16


@triton.jit
def _whole_pages(rank, PAGE: tl.constexpr):
    """The ranks of all pages that a rank takes; in the last page those beyond it are nought."""
    return (rank + PAGE - 1) // PAGE * PAGE


@triton.jit
def _in_pages(table, slot, nth, rank, MAX_RANK: tl.constexpr, PAGE: tl.constexpr):
    """The pages in which these ranks of a slot lie, and the place of each rank in its page."""
    page = tl.load(table + slot * (MAX_RANK // PAGE) + nth // PAGE, mask=nth < _whole_pages(rank, PAGE), other=0)
    return page.to(tl.int64), nth % PAGE


# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernels.
_ANYWHERE = ["order", "tile_slots", "tile_starts", "tile_counts", "ranks"]


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_ANYWHERE)
def shrink_kernel(
    x,  # -> [tokens, INPUTS]
    a,  # -> [slots, PARTS * MAX_RANK, INPUTS], or [pages, PARTS * PAGE, INPUTS]
    ranks,  # -> [slots] int32
    table,  # -> [slots, MAX_RANK / PAGE] int32, or None
    order,
    tile_slots,
    tile_starts,
    tile_counts,
    partial,  # -> [shares, tokens in their order, PARTS * MAX_RANK] float32
    tokens,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,  # inputs per program, a multiple of STEP
    STEP: tl.constexpr,
    OPERAND: tl.constexpr,  # what tl.dot multiplies
    PAGE: tl.constexpr,
):
    share, row_tile, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, rank, place, token, is_token = _look_up(tile, order, tile_slots, tile_starts, tile_counts, ranks, TILE)
    first = row_tile * ROWS
    first_in_part = first % MAX_RANK
    reaches_next_part = first_in_part + ROWS > MAX_RANK
    if rank == 0 or (first_in_part >= _padded(rank) and not reaches_next_part):
        return

    row = first + tl.arange(0, ROWS)
    is_row = (row % MAX_RANK < rank) & (row < PARTS * MAX_RANK)
    column = share * SHARE + tl.arange(0, STEP)
    x_at = x + token[:, None] * x_stride + column[None, :]
    if PAGE:
        page, nth = _in_pages(table, slot, row % MAX_RANK, rank, MAX_RANK, PAGE)
        a_row = (page * PARTS + row // MAX_RANK) * PAGE + nth
        a_at = a + a_row[:, None] * INPUTS + column[None, :]
    else:
        a_at = a + slot * (PARTS * MAX_RANK * INPUTS) + row[:, None] * INPUTS + column[None, :]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for _ in range(SHARE // STEP):
        inside = (column < INPUTS)[None, :]
        x_tile = tl.load(x_at, mask=is_token[:, None] & inside, other=0.0).to(OPERAND)
        a_tile = tl.load(a_at, mask=is_row[:, None] & inside, other=0.0).to(OPERAND)
        total = tl.dot(x_tile, tl.trans(a_tile), total, input_precision="ieee")
        column += STEP
        x_at += STEP
        a_at += STEP

    out = partial + (share * tokens + place[:, None]) * (PARTS * MAX_RANK) + row[None, :]
    is_stored = (row % MAX_RANK < _padded(rank)) & (row < PARTS * MAX_RANK)
    tl.store(out, total, mask=is_token[:, None] & is_stored[None, :])


@triton.jit
def _columns(tile, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, COLUMNS: tl.constexpr):
    """The part of a tile of columns, where the tile begins, and where the part ends.

        parts   |------- FIRST --------|--- SECOND ---|-- THIRD --|
        tiles   |-------|-------|------|-------|------|-------|---|

    The last tile of a part is cut short: no tile spans two parts.
    """
    first_tiles: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    second_tiles: tl.constexpr = (SECOND + COLUMNS - 1) // COLUMNS
    past_first = (tile >= first_tiles).to(tl.int32)
    past_second = (tile >= first_tiles + second_tiles).to(tl.int32)
    first_cut: tl.constexpr = first_tiles * COLUMNS - FIRST
    second_cut: tl.constexpr = second_tiles * COLUMNS - SECOND
    begin = tile * COLUMNS - past_first * first_cut - past_second * second_cut
    end = FIRST + past_first * SECOND + past_second * THIRD
    return past_first + past_second, begin, end


@triton.jit
def _b_at(b, table, slot, nth, rank, column, OUTPUTS: tl.constexpr, MAX_RANK: tl.constexpr, PAGE: tl.constexpr):
    """Where these ranks of a slot stand in B, by column."""
    if PAGE:
        page, in_page = _in_pages(table, slot, nth, rank, MAX_RANK, PAGE)
        return b + (page * PAGE + in_page)[:, None] * OUTPUTS + column[None, :]
    else:
        return b + slot * (MAX_RANK * OUTPUTS) + nth[:, None] * OUTPUTS + column[None, :]


@triton.jit
def _s_at(
    shrunk, table, slot, nth, rank, part, place, token, s_stride,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BY_TOKEN: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Where x @ A.T of these ranks of a part stands, by token."""
    if BY_TOKEN and PAGE:
        page, in_page = _in_pages(table, slot, nth, rank, MAX_RANK, PAGE)
        # The ranks of a page stand beside each other.
        column = tl.max_contiguous(tl.multiple_of((page * PARTS + part) * PAGE + in_page, PAGE), PAGE)
        return shrunk + token[:, None] * s_stride + column[None, :]
    else:
        s_at = shrunk + part * MAX_RANK + nth[None, :]
        if BY_TOKEN:
            s_at += token[:, None] * s_stride + slot * (PARTS * MAX_RANK)
        else:
            s_at += place[:, None] * (PARTS * MAX_RANK)
        return s_at


@triton.jit
def _is_stored(nth, rank, MAX_RANK: tl.constexpr, BY_TOKEN: tl.constexpr, PAGE: tl.constexpr):
    """Which of these ranks stand in x @ A.T; those beyond a slot's rank are nought there."""
    if BY_TOKEN and PAGE:
        return nth < _whole_pages(rank, PAGE)
    else:
        return (nth < _padded(rank)) & (nth < MAX_RANK)


@triton.jit
def _trimmed(y, trims, slot, column, end, OUTPUTS: tl.constexpr, TRIM: tl.constexpr):
    """A slot's gain and shift of these columns, applied to y."""
    if TRIM:
        at = trims + slot * TRIM + column
        gain = tl.load(at, mask=column < end, other=1.0)
        shift = tl.load(at + OUTPUTS, mask=column < end, other=0.0)
        return y * gain[None, :] + shift[None, :]
    else:
        return y


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_ANYWHERE)
def expand_kernel(
    y,  # -> [tokens, OUTPUTS]
    b,  # -> [slots, MAX_RANK, OUTPUTS], or [pages, PAGE, OUTPUTS]
    ranks,  # -> [slots] int32
    table,  # -> [slots, MAX_RANK / PAGE] int32, or None
    trims,  # -> [slots, gains and shifts, OUTPUTS] float32, or None
    order, tile_slots, tile_starts, tile_counts,
    shrunk,  # -> [SHARES, tokens in their order, PARTS * MAX_RANK]; BY_TOKEN: [tokens, all rows of A]
    tokens,
    y_stride,
    s_stride,  # of shrunk, BY_TOKEN
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,  # widths of the parts, 0 where there is none
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,  # ranks per iteration
    OPERAND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PAGE: tl.constexpr,
    TRIM: tl.constexpr,  # numbers from a slot's trims to the next slot's; 0: there are none
):  # fmt: skip
    tile = tl.program_id(1)
    part, begin, end = _columns(tl.program_id(0), FIRST, SECOND, THIRD, COLUMNS)
    slot, rank, place, token, is_token = _look_up(tile, order, tile_slots, tile_starts, tile_counts, ranks, TILE)
    if rank == 0:
        return

    OUTPUTS: tl.constexpr = FIRST + SECOND + THIRD
    nth = tl.arange(0, RANKS)
    column = begin + tl.arange(0, COLUMNS)
    inside = (column < end)[None, :]
    b_at = _b_at(b, table, slot, nth, rank, column, OUTPUTS, MAX_RANK, PAGE)
    # B is loaded one iteration ahead, while the shares of the iteration before are added.
    b_tile = tl.load(b_at, mask=(nth < rank)[:, None] & inside, other=0.0)
    s_at = _s_at(shrunk, table, slot, nth, rank, part, place, token, s_stride, PARTS, MAX_RANK, BY_TOKEN, PAGE)
    y_at = y + token[:, None] * y_stride + column[None, :]
    is_real = is_token[:, None] & inside
    base = tl.load(y_at, mask=is_real, other=0.0)
    # A large sum begins with y: then it enters and leaves the matrix instructions' layout in y's precision, not in
    # float32 (2,048 tokens of gate_up: 89 instead of 108 us). A small one need not wait for y.
    BEGINS_WITH_Y: tl.constexpr = TILE > _SMALL_TILE
    total = base.to(tl.float32) if BEGINS_WITH_Y else tl.zeros([TILE, COLUMNS], tl.float32)
    for _ in range(0, rank, RANKS):
        is_stored = is_token[:, None] & _is_stored(nth, rank, MAX_RANK, BY_TOKEN, PAGE)[None, :]
        s = tl.load(s_at, mask=is_stored, other=0.0).to(tl.float32)
        # Not a static_range: in an unrolled sum the compiler would move each share through shared memory separately.
        for share in range(1, SHARES):
            s += tl.load(s_at + share * tokens * (PARTS * MAX_RANK), mask=is_stored, other=0.0)
        total = tl.dot(s.to(OPERAND), b_tile.to(OPERAND), total, input_precision="ieee")
        nth += RANKS
        if PAGE:
            s_at = _s_at(shrunk, table, slot, nth, rank, part, place, token, s_stride, PARTS, MAX_RANK, BY_TOKEN, PAGE)
            b_at = _b_at(b, table, slot, nth, rank, column, OUTPUTS, MAX_RANK, PAGE)
        else:
            s_at += RANKS
            b_at += RANKS * OUTPUTS
        b_tile = tl.load(b_at, mask=(nth < rank)[:, None] & inside, other=0.0)
    if not BEGINS_WITH_Y:
        total += base.to(tl.float32)
    total = _trimmed(total, trims, slot, column, end, OUTPUTS, TRIM)
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_real)
