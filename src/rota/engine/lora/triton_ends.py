"""The ends on a GPU: launches that shapes alone decide, so that a captured graph serves any assignment."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from rota.engine.lora.ends import EndBank
from rota.engine.lora.own_matrices import OwnMatrices
from rota.engine.lora.triton_head_kernel import own_head_kernel
from rota.engine.lora.triton_ops import add_lora, expand, operand, tuning_for
from rota.engine.step.lora_batch import LoraBatch

# Of `own_head_kernel`: tokens of a program, and inputs of an iteration.
COLUMNS, STEP, WARPS, STAGES = 128, 64, 4, 4


class TritonEnds:
    """The head is a site. Of the embedding only B is multiplied, behind a look-up in the place of shrink.

    A matrix of an adapter's own comes first: it overwrites what the model's has given.
    """

    def __init__(self, bank: EndBank) -> None:
        self._bank = bank

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

    def head(self, logits: Tensor, hidden: Tensor, batch: LoraBatch) -> None:
        if not len(hidden):
            return
        if self._bank.own is not None:
            use_own_heads(logits, hidden, self._bank.own, batch)
        if self._bank.head is not None:
            add_lora(logits, hidden, self._bank.head, batch)


def look_up_own(x: Tensor, token_ids: Tensor, own: OwnMatrices, batch: LoraBatch) -> None:
    """x [tokens, hidden] becomes the row of its adapter's own embedding, where the adapter has one."""
    place = own.embeddings[batch.token_slots.long()]
    _, vocabulary, hidden = own.numbers.shape
    rows = own.numbers.view(-1, hidden).index_select(0, place.clamp(min=0).long() * vocabulary + token_ids)
    x.copy_(torch.where((place >= 0)[:, None], rows, x))


def use_own_heads(logits: Tensor, hidden: Tensor, own: OwnMatrices, batch: LoraBatch) -> None:
    """logits [rows, tokens] = hidden Hᵀ, for rows whose adapter has a head of its own."""
    assert logits.stride(1) == hidden.stride(1) == 1
    assert hidden.dtype == own.numbers.dtype
    outputs, inputs = logits.shape[1], hidden.shape[1]
    own_head_kernel[(triton.cdiv(outputs, COLUMNS), len(batch.tile_slots))](
        logits, hidden, own.numbers, own.heads, batch.order, batch.tile_slots, batch.tile_starts, batch.tile_counts,
        logits.stride(0), hidden.stride(0), MATRIX=own.numbers.stride(0), INPUTS=inputs, OUTPUTS=outputs,
        TILE=batch.tile_size, COLUMNS=COLUMNS, STEP=STEP, OPERAND=operand(own.numbers), num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
