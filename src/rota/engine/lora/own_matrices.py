"""Own matrices are an embedding or a head of an adapter's own, in the place of the model's (PEFT's modules_to_save).

    places    | 0           | 1          |            each [vocabulary, hidden]: a gigabyte of an 8B with 128,256 tokens
    slot 0    its embedding   its head
    slot 1    has neither

They are too large to have one for every slot: the scheduler's ledger gives places as it gives pages, and as many slots
are open as the places allow. A rank's head is the beginning of a place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rota.engine.lora.copies.lines import copy_lines
from rota.engine.lora.host import HostAdapter
from rota.engine.lora.zeros import zeros
from rota.engine.model.spec import ModelSpec

NONE = -1


def matrix_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The bytes of one place."""
    return spec.vocab_size * spec.hidden_size * dtype.itemsize


class OwnMatrices:
    """The matrices of all slots, and which slot has which."""

    def __init__(self, spec: ModelSpec, places: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = zeros((places, spec.vocab_size, spec.hidden_size), dtype, device)
        self.size_bytes = self.numbers.nbytes
        # By slot, and last the base model's: the place of its matrix, on the device and on the host.
        self.embeddings, self.heads = (torch.full((slots + 1,), NONE, dtype=torch.int32, device=device) for _ in "ab")
        self._places = {"embedding": [NONE] * slots, "head": [NONE] * slots}

    def embedding(self, slot: int) -> Tensor | None:
        """[vocabulary, hidden] of the adapter in the slot; None if it has the model's."""
        return self._at(self._places["embedding"][slot])

    def head(self, slot: int) -> Tensor | None:
        """The same of the head; a rank's has fewer rows, and the rest is not used."""
        return self._at(self._places["head"][slot])

    def copy_in(self, slot: int, adapter: HostAdapter | None, places: Sequence[int]) -> None:
        """Replace the slot's matrices, or leave it without; queued as the bank's copies are."""
        left = iter(places)
        for end, table, pieces in (
            ("embedding", self.embeddings, None if adapter is None else adapter.own_embedding),
            ("head", self.heads, None if adapter is None else adapter.own_head),
        ):
            place = NONE if pieces is None else next(left)
            if pieces is not None:
                target = self.numbers[place].view(-1)
                copy_lines([target[: sum(piece.numel() for piece in pieces)]], pieces)
            self._places[end][slot] = place
            table[slot] = place

    def _at(self, place: int) -> Tensor | None:
        return None if place == NONE else self.numbers[place]
