"""Shares cut the attention of a step into work of about equal size, on the device and once for all its layers.

    a unit     what one program could do: a decoding row, or a block of a chunk's queries; its span is the keys it reads
    fair       the keys of all units over the programs that are to run at once
    a share    one entry of the list: a whole unit, or a piece of one whose span is well above fair

    list       head | whole, long | piece piece piece ... | whole, short | nothing
                                  of cut units, by unit

Long work comes first, so that what is left at the end is short. The list has a bounded length (`CutBounds`) and is
written anew in every step, so a captured graph serves any lengths.

Where rows are few enough, shares are as short as they can be if all are to run at once. One more would begin when the
first one ends: where 132 run at once, 48 x 700 tokens in 144 pieces took 39 us, and 64 x 600 in 128 pieces took 30.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

# int32 of the head: entries, pieces, where pieces begin. Of an entry: unit, its part (a table's row, or the block), its
# first key, its end, the unit's first piece, how many it has, this one. Pieces are numbered through, not whole units.
ENTRY = 8
_ENTRY = tl.constexpr(ENTRY)
# Lengths of shares that are tried, from a fair one on, and how many of them make twice a length.
_CHOICES = tl.constexpr(8)
_TO_TWICE = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class CutBounds:
    """How finely units are cut, and how long the list may get by that."""

    slots: int  # programs of one kv head that run at once
    cuts: int  # pieces that make a fair share: small ones fill the gaps that whole units leave
    shortest: int  # keys of a piece, unless longer ones would leave slots empty
    most_pieces: int  # of one unit
    spare: int  # keys above fair that a unit may have and stay whole: cutting it would take as long as reading them
    fits: bool = False  # whether all shares are to run at once; if they cannot, the rest of this holds

    @property
    def pieces(self) -> int:
        """Of all cut units: as many as their keys need and one each, and fewer units than slots are above fair."""
        return self.slots * (self.cuts + 1)

    def shares(self, units: int) -> int:
        return units + self.slots * self.cuts

    def numbers(self, units: int) -> int:
        """int32 of the list, its head included."""
        return ENTRY * (1 + self.shares(units))

    @property
    def arguments(self) -> tuple[int, ...]:
        """Of the kernels that write a list."""
        return self.slots, self.cuts, self.shortest, self.most_pieces, self.spare


@triton.jit
def entry_of(shares, index):
    """(unit, part, first key, end, first piece, pieces, this one) of the list's entry."""
    entry = shares + _ENTRY + index * _ENTRY
    return (
        tl.load(entry),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
        tl.load(entry + 5),
        tl.load(entry + 6),
    )


@triton.jit
def next_entry(taken, count, call):
    """What a program of a grid (kv_heads, programs) does next, first come first served; `count`: nothing.

    Where there are more entries than programs, each call asks `count` times for a kv head: once for every entry beyond
    the programs' first, and once for every program that is told there is no more.
    """
    programs = tl.num_programs(1)
    index = count
    if count > programs:
        index = programs + tl.atomic_add(taken, 1, sem="relaxed") - call * count
    return index


@triton.jit
def _fitting(span, is_real, shortest, slots, TILE: tl.constexpr):
    """The first of some lengths, in whole tiles, of which all units together make at most `slots`; 0: none is."""
    longer = tl.exp2(tl.arange(0, _CHOICES).to(tl.float32) / _TO_TWICE)
    sizes = tl.maximum(tl.cdiv((shortest * longer).to(tl.int32), TILE), 1) * TILE
    made = tl.where(is_real[:, None], tl.maximum(tl.cdiv(span[:, None], sizes[None, :]), 1), 0)
    none = tl.max(sizes, 0) + 1
    first = tl.min(tl.where(tl.sum(made, 0) <= slots, sizes, none), 0)
    return tl.where(first < none, first, 0)


@triton.jit
def _write_shares(
    shares, unit, part, low, high, is_real, slots, cuts, shortest, most_pieces, spare, TILE: tl.constexpr,
    FITS: tl.constexpr,
):  # fmt: skip
    """Write the list of units [UNITS] that read the keys [low, high); gives their first pieces and how many."""
    span = tl.where(is_real, high - low, 0)
    total = tl.sum(span.to(tl.int64), 0)
    fair = tl.cdiv(total, slots).to(tl.int32)
    share = tl.maximum(tl.cdiv(fair, cuts), tl.minimum(fair, shortest))
    # A little more, or units of nearly twice a share would come to three pieces.
    share += share // 16
    whole = fair + fair // 16 + spare
    if FITS:
        fitting = _fitting(span, is_real, tl.maximum(fair, shortest), slots, TILE)
        share = tl.where(fitting > 0, fitting, share)
        whole = tl.where(fitting > 0, fitting, whole)
    size = tl.maximum(share, tl.cdiv(span, most_pieces))
    size = tl.maximum(tl.cdiv(size, TILE), 1) * TILE
    # Pieces of one unit are equally long, up to a tile.
    size = tl.cdiv(tl.cdiv(span, tl.maximum(tl.cdiv(span, size), 1)), TILE) * TILE
    pieces = tl.where(span > whole, tl.cdiv(span, tl.maximum(size, 1)), 1)
    is_cut = is_real & (pieces > 1)
    pieces = tl.where(is_cut, pieces, 1)
    longest = tl.max(tl.where(is_cut, size, 0), 0)
    size = tl.where(is_cut, size, span)

    is_first = (is_real & (pieces == 1) & (span > longest)).to(tl.int32)
    is_last = (is_real & (pieces == 1) & (span <= longest)).to(tl.int32)
    cut = tl.where(is_cut, pieces, 0)
    all_first, all_cut, all_last = tl.sum(is_first, 0), tl.sum(cut, 0), tl.sum(is_last, 0)
    first_piece = tl.cumsum(cut, 0) - cut
    # The last ones first: of a prompt they read most.
    place = tl.where(is_first == 1, all_first - tl.cumsum(is_first, 0), all_first + first_piece)
    place = tl.where(is_last == 1, all_first + all_cut + all_last - tl.cumsum(is_last, 0), place)
    tl.store(shares, all_first + all_cut + all_last)
    tl.store(shares + 1, all_cut)
    tl.store(shares + 2, all_first)
    for piece in range(0, tl.max(pieces, 0)):
        is_mine = is_real & (piece < pieces)
        begin = low + piece * size
        entry = shares + _ENTRY + (place + piece) * _ENTRY
        tl.store(entry, unit, mask=is_mine)
        tl.store(entry + 1, part, mask=is_mine)
        tl.store(entry + 2, begin, mask=is_mine)
        tl.store(entry + 3, tl.minimum(begin + size, high), mask=is_mine)
        tl.store(entry + 4, first_piece, mask=is_mine)
        tl.store(entry + 5, pieces, mask=is_mine)
        tl.store(entry + 6, first_piece + piece, mask=is_mine)
    return first_piece, pieces


_NUMBERS = ["window", "slots", "cuts", "shortest", "most_pieces", "spare"]


# What a step brings may lie anywhere in a larger buffer: no recompilation when its alignment changes.
@triton.jit(do_not_specialize=["decodes", *_NUMBERS], do_not_specialize_on_alignment=["rows", "lengths"])
def share_decodes(
    shares,  # -> int32, the list
    ranges,  # -> [decodes, 2] int32: first piece, pieces
    taken,  # -> [kv_heads] int32: see `next_entry`
    rows,  # -> [decodes] int32
    lengths,  # -> [decodes] int32
    decodes,
    window,  # 0: none
    slots,
    cuts,
    shortest,
    most_pieces,
    spare,
    UNITS: tl.constexpr,  # decodes, or more
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    FITS: tl.constexpr,
):
    """Units are decodes, parts their rows."""
    decode = tl.arange(0, UNITS)
    is_real = decode < decodes
    length = tl.load(lengths + decode, mask=is_real, other=0)
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    row = tl.load(rows + decode, mask=is_real, other=0)
    first, pieces = _write_shares(
        shares, decode, row, low, length, is_real, slots, cuts, shortest, most_pieces, spare, TILE, FITS
    )
    for kv_head in range(0, KV_HEADS):
        tl.store(taken + kv_head, 0)
    tl.store(ranges + 2 * decode, first, mask=is_real)
    tl.store(ranges + 2 * decode + 1, pieces, mask=is_real)


@triton.jit(do_not_specialize=["chunks", *_NUMBERS], do_not_specialize_on_alignment=["starts", "offsets"])
def share_chunks(
    shares,  # -> int32, the list
    starts,  # -> [chunks] int32
    offsets,  # -> [chunks + 1] int32
    chunks,
    window,
    slots,
    cuts,
    shortest,
    most_pieces,
    spare,
    UNITS: tl.constexpr,  # blocks of all chunks, or more
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Units are chunks, once for each block of QUERIES packed rows; parts are the blocks."""
    place = tl.arange(0, UNITS)
    unit, part = tl.zeros([UNITS], tl.int32), tl.zeros([UNITS], tl.int32)
    start, length = tl.zeros([UNITS], tl.int32), tl.zeros([UNITS], tl.int32)
    end = 0
    for chunk in range(0, chunks):
        tokens = tl.load(offsets + chunk + 1) - tl.load(offsets + chunk)
        begin = end
        end += tl.cdiv(tokens * GROUP, QUERIES)
        is_here = (place >= begin) & (place < end)
        unit = tl.where(is_here, chunk, unit)
        part = tl.where(is_here, place - begin, part)
        start = tl.where(is_here, tl.load(starts + chunk), start)
        length = tl.where(is_here, tokens, length)
    low, high = block_span(start, length, part, window, GROUP, QUERIES)
    _write_shares(shares, unit, part, low, high, place < end, slots, cuts, shortest, most_pieces, spare, TILE, False)


@triton.jit
def block_span(start, length, block, window, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Keys [low, high) that a block of a chunk's queries sees, each of them at least one."""
    first = start + block * QUERIES // GROUP
    last = tl.minimum((block * QUERIES + QUERIES - 1) // GROUP, length - 1)
    return tl.where(window > 0, tl.maximum(first - window + 1, 0), 0), start + last + 1
