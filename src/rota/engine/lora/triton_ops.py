"""Adapters on a GPU take one or two launches at a site, whatever their number, with grids that shapes alone decide.

Kernels read on the device what varies from step to step (slots, ranks, tiles). So a captured CUDA graph serves any
assignment of tokens to adapters.
"""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.deferred import DeferredLora, Output
from rota.engine.lora.layout import SiteFactors
from rota.engine.model.linear import Projection
from rota.engine.step.device_step import LoraBatch

# ── triton kernels ──────────────────────────────────────────────────────────────────────────────────────────────────
# Two kernels apply every adapter of a step at one site: shrink computes x @ A.T in shares, expand adds B's part to y.
#
#     shrink    program (share of the inputs, rows of A, tile)     x[tile] @ A[slot].T   ->  partial[share]
#     expand    program (columns of a part, tile)                  sum(partial) @ B[slot]  +=>  y[tile]
#
# All tokens of a tile have one slot, so a program multiplies plain matrices. Slots differ only in a pointer and a rank,
# both read on the device. Few tokens make little work, and shares spread it over all processors. The expand kernel adds
# the shares: no atomics, no zeroing, the same sum every time.
#
# With pages (PAGE ranks each, files/ranks.py) a slot is a row of a table: one more number is read for each rank,
# before the rank's own numbers. Without them (PAGE is 0) nothing is looked up, and the kernels are as if there were
# no pages.
#
# With gains and biases (gain_bias.py) expand ends with  y = gain · y + shift.  Without them (GAIN_BIAS is 0) it is as
# if there were none.

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
def _with_gain_bias(y, gain_bias, slot, column, end, OUTPUTS: tl.constexpr, GAIN_BIAS: tl.constexpr):
    """A slot's gain and shift of these columns, applied to y."""
    if GAIN_BIAS:
        at = gain_bias + slot * GAIN_BIAS + column
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
    gain_bias,  # -> [slots, gains and shifts, OUTPUTS] float32, or None
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
    GAIN_BIAS: tl.constexpr,  # numbers from a slot's gains and biases to the next slot's; 0: there are none
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
    total = _with_gain_bias(total, gain_bias, slot, column, end, OUTPUTS, GAIN_BIAS)
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_real)


# ── triton turn ─────────────────────────────────────────────────────────────────────────────────────────────────────
# A kernel that turns B on the way to its place: what is stored side by side by rank lies side by side by output then.
#
# Torch's own copy of a turned tensor reads 32 bytes for each number of an adapter of rank 16. It took 0.7 ms for 42 MB,
# beside which a decode step took 1.13 times as long (H200, 2026-11-17).

# Numbers of a program's tile; few kernels for many ranks.
TILE, FEWEST_RANKS = 4096, 16


def turn(stored: Tensor, first: int, target: Tensor, scale: float) -> None:
    """stored: [layers, outputs, rank]; target: [layers, some of the ranks, outputs], those from `first` on."""
    layers, outputs, rank = stored.shape
    ranks = max(FEWEST_RANKS, triton.next_power_of_2(target.shape[1]))
    block = max(1, TILE // ranks)
    turn_kernel[(triton.cdiv(outputs, block), layers)](
        stored, target, outputs, rank, first, target.shape[1], target.stride(0), scale, RANKS=ranks, BLOCK=block
    )


@triton.jit
def turn_kernel(
    stored, target, outputs, rank, first, count, layer_stride, scale, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    # A bank of many slots has more than 2**31 numbers.
    layer = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, RANKS)
    is_real = (output < outputs)[:, None] & (number < count)[None, :]
    place = stored + layer * outputs * rank + output[:, None] * rank + first + number[None, :]
    values = tl.load(place, mask=is_real, other=0.0).to(tl.float32) * scale
    turned = tl.trans(values.to(target.dtype.element_ty))
    to = target + layer * layer_stride + number[:, None] * outputs + output[None, :]
    tl.store(to, turned, mask=(number < count)[:, None] & (output < outputs)[None, :])


# The smallest number of rows a matrix instruction takes.
SMALLEST_DOT = 16
_OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class ShrinkTuning:
    """Shapes of the shrink kernel; `benchmarks/lora_kernels.py --sweep` compares them."""

    rows: int  # rows of A per program
    share: int  # inputs per program, more if there would be too many shares
    most_shares: int  # each program of expand reads all shares
    step: int  # inputs per iteration
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpandTuning:
    """Shapes of the expand kernel."""

    columns: int  # outputs per program
    ranks: int  # ranks per iteration
    warps: int


@dataclass(frozen=True, slots=True)
class LoraTuning:
    shrink: ShrinkTuning
    expand: ExpandTuning


DECODE = LoraTuning(
    ShrinkTuning(rows=16, share=512, most_shares=16, step=128, warps=4, stages=4),
    ExpandTuning(columns=256, ranks=16, warps=4),
)
PREFILL = LoraTuning(
    ShrinkTuning(rows=64, share=1024, most_shares=4, step=64, warps=4, stages=4),
    ExpandTuning(columns=256, ranks=16, warps=4),
)


def add_lora(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: LoraTuning | None = None) -> None:
    """y [tokens, outputs] += what each token's adapter makes of x [tokens, inputs]; base tokens do not change."""
    tuning = tuning or tuning_for(batch)
    expand(y, shrink(x, factors, batch, tuning), factors, batch, tuning)


def split_widened(product: Tensor, factors: SiteFactors) -> tuple[Tensor, Tensor]:
    """y and x @ A.T of all slots in a product by a matrix that has a fused LoRA A: views, neither is contiguous."""
    y, shrunk = product.tensor_split([factors.shape.outputs], dim=1)
    return y, shrunk


class TritonProjector:
    """A projection that is open for what adapters add. If the site has a fused LoRA A, shrink is part of the product.

    Else shrink runs beside the product, since both read x and neither needs the other. That is so only in a captured
    graph: there a fork costs nothing on the host, and a replay keeps it.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def __call__(self, project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Output:
        tuning = tuning_for(batch)
        y, shrunk = self._multiplied(project, x, factors, batch, tuning)
        product = DeferredLora(y=y, shrunk=shrunk, factors=factors, batch=batch, add=partial(expand, tuning=tuning))
        # Operations that add the adapters' part themselves read no pages.
        return product if factors.table is None else product.closed()

    def _multiplied(
        self, project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: LoraTuning
    ) -> tuple[Tensor, Tensor]:
        if project.widened is not None:
            return split_widened(project.widened(x), factors)
        if not torch.cuda.is_current_stream_capturing():
            return project(x), shrink(x, factors, batch, tuning)
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            shrunk = shrink(x, factors, batch, tuning)
        y = project(x)
        main.wait_stream(self._side)
        return y, shrunk


def tuning_for(batch: LoraBatch) -> LoraTuning:
    return DECODE if batch.tile_size == DECODE_TILE else PREFILL


def shrink(x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: LoraTuning) -> Tensor:
    """x @ A.T by shares of the inputs: [shares, tokens in the batch's order, parts * max_rank] float32.

    Written only where expand reads.
    """
    a, shape, shapes = factors.a, factors.shape, tuning.shrink
    assert x.stride(1) == 1
    assert a.is_contiguous()
    assert x.dtype == a.dtype
    tokens, all_rows = x.shape[0], len(shape.parts) * factors.max_rank
    share = triton.cdiv(max(shapes.share, triton.cdiv(shape.inputs, shapes.most_shares)), shapes.step) * shapes.step
    shares = triton.cdiv(shape.inputs, share)
    rows = _at_most(shapes.rows, all_rows)
    partial = torch.empty(shares, tokens, all_rows, dtype=torch.float32, device=x.device)
    shrink_kernel[(shares, triton.cdiv(all_rows, rows), len(batch.tile_slots))](
        x, a, factors.ranks, factors.table, batch.order, batch.tile_slots, batch.tile_starts, batch.tile_counts,
        partial, tokens, x.stride(0), INPUTS=shape.inputs, PARTS=len(shape.parts), MAX_RANK=factors.max_rank,
        TILE=batch.tile_size, ROWS=rows, SHARE=share, STEP=shapes.step, OPERAND=operand(a), PAGE=_page(factors),
        num_warps=shapes.warps, num_stages=shapes.stages,
    )  # fmt: skip
    return partial


def expand(y: Tensor, shrunk: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: LoraTuning) -> None:
    """y += shrunk @ B, each part with its own columns; then y is scaled and shifted, if slots have gains and biases.

    shrunk: the shares that shrink gave on the same stream; or x @ A.T of all places, [tokens, all rows of A or more].
    """
    b, widths, shapes = factors.b, factors.shape.widths, tuning.expand
    assert y.stride(1) == 1
    assert b.is_contiguous()
    assert y.dtype == b.dtype
    first, second, third = (*widths, 0, 0)[:3]
    # Float32 multiplies from registers, and its numbers take twice the space: half the columns.
    columns = _at_most(shapes.columns * 2 // y.element_size(), max(widths))
    by_token = shrunk.dim() == 2
    expand_kernel[(sum(triton.cdiv(width, columns) for width in widths), len(batch.tile_slots))](
        y, b, factors.ranks, factors.table, None if factors.gain_bias is None else factors.gain_bias.numbers,
        batch.order, batch.tile_slots, batch.tile_starts, batch.tile_counts, shrunk, y.shape[0], y.stride(0),
        shrunk.stride(-2), FIRST=first, SECOND=second, THIRD=third, PARTS=len(widths), MAX_RANK=factors.max_rank,
        SHARES=1 if by_token else shrunk.shape[0], TILE=batch.tile_size, COLUMNS=columns,
        RANKS=_at_most(shapes.ranks, factors.max_rank), OPERAND=operand(b), BY_TOKEN=by_token, PAGE=_page(factors),
        GAIN_BIAS=0 if factors.gain_bias is None else factors.gain_bias.numbers.stride(0),
        num_warps=shapes.warps, num_stages=1,
    )  # fmt: skip


def _at_most(wanted: int, needed: int) -> int:
    """`wanted`, or less if less is needed, but a size that matrix instructions take."""
    return min(wanted, max(SMALLEST_DOT, triton.next_power_of_2(needed)))


def _page(factors: SiteFactors) -> int:
    """The ranks of a page; 0 where slots have places of their own."""
    return 0 if factors.table is None else factors.place_rank


def operand(factor: Tensor) -> tl.dtype:
    # The interpreter stores bfloat16 as integers and multiplies the integers; only float32 is right there.
    return tl.float32 if triton.knobs.runtime.interpret else _OPERANDS[factor.dtype]
