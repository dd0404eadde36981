"""The ends on a GPU: launches that shapes alone decide, so that a captured graph serves any assignment."""

from __future__ import annotations

from torch import Tensor

from rota.engine.lora.ends import EndBank
from rota.engine.lora.triton_ops import add_lora, expand, tuning_for
from rota.engine.step.lora_batch import LoraBatch


class TritonEnds:
    """The head is a site. Of the embedding only B is multiplied, behind a look-up in the place of shrink."""

    def __init__(self, bank: EndBank) -> None:
        self._bank = bank

    def embed(self, x: Tensor, token_ids: Tensor, batch: LoraBatch) -> None:
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
        if self._bank.head is not None and len(hidden):
            add_lora(logits, hidden, self._bank.head, batch)
