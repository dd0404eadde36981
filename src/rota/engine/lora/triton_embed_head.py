"""Embedding and head on a GPU: launches that shapes alone decide, so that a captured graph serves any assignment."""

# Kernel parameters are pointers and device scalars, which Python's types do not describe.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.lora.embed_head import EmbedHead, EmbedHeadBank, OwnMatrices
from rota.engine.lora.triton_ops import add_lora, expand, operand, tuning_for
from rota.engine.step.device_step import LoraBatch

# ── triton head kernel ──────────────────────────────────────────────────────────────────────────────────────────────
# The head of an adapter's own on a GPU: the logits of its rows are overwritten, and all others are left alone.


# A step's inputs may lie anywhere in a larger buffer: a new alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["order", "tile_slots", "tile_starts", "tile_counts"])
def own_head_kernel(
    logits,  # -> [rows, OUTPUTS or more]
    x,  # -> [rows, INPUTS]
    matrices,  # -> [places, MATRIX]
    heads,  # -> [slots + 1] int32: the place of a slot's head, below 0 if it has the model's
    order,
    tile_slots,
    tile_starts,
    tile_counts,
    logits_stride,
    x_stride,
    MATRIX: tl.constexpr,  # numbers of a place
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    OPERAND: tl.constexpr,  # what tl.dot multiplies
):
    tile = tl.program_id(1)
    count = tl.load(tile_counts + tile)
    place = tl.load(heads + tl.load(tile_slots + tile))
    if count == 0 or place < 0:
        return
    nth = tl.arange(0, TILE)
    is_row = nth < count
    row = tl.load(order + tl.load(tile_starts + tile) + nth, mask=is_row, other=0).to(tl.int64)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < OUTPUTS
    column = tl.arange(0, STEP)
    x_at = x + row[:, None] * x_stride + column[None, :]
    # In 64 bits: a few matrices of a large vocabulary have more than 2³¹ numbers.
    own = matrices + place.to(tl.int64) * MATRIX
    own_at = own + output[:, None] * INPUTS + column[None, :]
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for _ in range(0, INPUTS, STEP):
        inside = (column < INPUTS)[None, :]
        x_tile = tl.load(x_at, mask=is_row[:, None] & inside, other=0.0).to(OPERAND)
        own_tile = tl.load(own_at, mask=is_output[:, None] & inside, other=0.0).to(OPERAND)
        total = tl.dot(x_tile, tl.trans(own_tile), total, input_precision="ieee")
        column += STEP
        x_at += STEP
        own_at += STEP
    out = logits + row[:, None] * logits_stride + output[None, :]
    tl.store(out, total.to(logits.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


# ── triton ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Of `own_head_kernel`: tokens of a program, and inputs of an iteration.
COLUMNS, STEP, WARPS, STAGES = 128, 64, 4, 4


class TritonEmbedHead(EmbedHead):
    """The head is a site. Of the embedding only B is multiplied, behind a look-up in the place of shrink."""

    def __init__(self, bank: EmbedHeadBank) -> None:
        super().__init__(bank, add_lora)

    def embed(self, x: Tensor, token_ids: Tensor, batch: LoraBatch) -> None:
        if self._bank.own is not None:
            look_up_own(x, token_ids, self._bank.own, batch)
        factors = self._bank.embedding
        if factors is None:
            return
        slots, vocabulary, rank = factors.a.shape
        # In the batch's order, as shrink gives it. The base model's tokens are in no tile: what they find is not read.
        order = batch.order.long()
        rows = batch.token_slots[order].clamp(max=slots - 1).long() * vocabulary + token_ids[order]
        shrunk = factors.a.view(-1, rank).index_select(0, rows).float()
        expand(x, shrunk[None], factors, batch, tuning_for(batch))

    def _use_own_heads(self, logits: Tensor, hidden: Tensor, own: OwnMatrices, batch: LoraBatch) -> None:
        assert logits.stride(1) == hidden.stride(1) == 1
        assert hidden.dtype == own.numbers.dtype
        outputs, inputs = logits.shape[1], hidden.shape[1]
        own_head_kernel[(triton.cdiv(outputs, COLUMNS), len(batch.tile_slots))](
            logits, hidden, own.numbers, own.heads, batch.order, batch.tile_slots, batch.tile_starts,
            batch.tile_counts, logits.stride(0), hidden.stride(0), MATRIX=own.numbers.stride(0), INPUTS=inputs,
            OUTPUTS=outputs, TILE=batch.tile_size, COLUMNS=COLUMNS, STEP=STEP, OPERAND=operand(own.numbers),
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip


def look_up_own(x: Tensor, token_ids: Tensor, own: OwnMatrices, batch: LoraBatch) -> None:
    """x [tokens, hidden] becomes the row of its adapter's own embedding, where the adapter has one."""
    place = own.embeddings[batch.token_slots.long()]
    _, vocabulary, hidden = own.numbers.shape
    rows = own.numbers.view(-1, hidden).index_select(0, place.clamp(min=0).long() * vocabulary + token_ids)
    x.copy_(torch.where((place >= 0)[:, None], rows, x))
