"""Adapters on a GPU take one or two launches at a site, whatever their number, with grids that shapes alone decide.

Kernels read on the device what varies from step to step (slots, ranks, tiles). So a captured CUDA graph serves any
assignment of tokens to adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.lora.batch import DECODE_TILE
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.open_product import OpenProduct, Output
from rota.engine.lora.triton_kernels import expand_kernel, shrink_kernel
from rota.engine.model.linear import Matrix, Projection
from rota.engine.step.lora_batch import LoraBatch

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
class Tuning:
    shrink: ShrinkTuning
    expand: ExpandTuning


DECODE = Tuning(
    ShrinkTuning(rows=16, share=512, most_shares=16, step=128, warps=4, stages=4),
    ExpandTuning(columns=256, ranks=16, warps=4),
)
PREFILL = Tuning(
    ShrinkTuning(rows=64, share=1024, most_shares=4, step=64, warps=4, stages=4),
    ExpandTuning(columns=256, ranks=16, warps=4),
)


def add_lora(y: Tensor, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning | None = None) -> None:
    """y [tokens, outputs] += what each token's adapter makes of x [tokens, inputs]; base tokens do not change."""
    tuning = tuning or tuning_for(batch)
    expand(y, shrink(x, factors, batch, tuning), factors, batch, tuning)


def project_widened(
    matrix: Matrix, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning | None = None
) -> Tensor:
    """A product with a matrix that has an annex, plus what each token's adapter adds: a view, not contiguous."""
    y, shrunk = split_widened(matrix(x), factors)
    expand(y, shrunk, factors, batch, tuning or tuning_for(batch))
    return y


def split_widened(product: Tensor, factors: SiteFactors) -> tuple[Tensor, Tensor]:
    """y and x @ A.T of all slots in a product by a matrix that has an annex: views, neither is contiguous."""
    y, shrunk = product.tensor_split([factors.shape.outputs], dim=1)
    return y, shrunk


class TritonProjector:
    """A projection that is open for what adapters add. If the site has an annex, shrink is part of the product.

    Else shrink runs beside the product, since both read x and neither needs the other. That is so only in a captured
    graph: there a fork costs nothing on the host, and a replay keeps it.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def __call__(self, project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch) -> Output:
        tuning = tuning_for(batch)
        y, shrunk = self._multiplied(project, x, factors, batch, tuning)
        product = OpenProduct(y=y, shrunk=shrunk, factors=factors, batch=batch, add=partial(expand, tuning=tuning))
        # Operations that add the adapters' part themselves read no pages.
        return product if factors.table is None else product.closed()

    def _multiplied(
        self, project: Projection, x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning
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


def tuning_for(batch: LoraBatch) -> Tuning:
    return DECODE if batch.tile_size == DECODE_TILE else PREFILL


def shrink(x: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning) -> Tensor:
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


def expand(y: Tensor, shrunk: Tensor, factors: SiteFactors, batch: LoraBatch, tuning: Tuning) -> None:
    """y += shrunk @ B, each part with its own columns; then y is trimmed, if slots have trims.

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
        y, b, factors.ranks, factors.table, None if factors.trims is None else factors.trims.numbers,
        batch.order, batch.tile_slots, batch.tile_starts, batch.tile_counts, shrunk, y.shape[0], y.stride(0),
        shrunk.stride(-2), FIRST=first, SECOND=second, THIRD=third, PARTS=len(widths), MAX_RANK=factors.max_rank,
        SHARES=1 if by_token else shrunk.shape[0], TILE=batch.tile_size, COLUMNS=columns,
        RANKS=_at_most(shapes.ranks, factors.max_rank), OPERAND=operand(b), BY_TOKEN=by_token, PAGE=_page(factors),
        TRIM=0 if factors.trims is None else factors.trims.numbers.stride(0), num_warps=shapes.warps, num_stages=1,
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
