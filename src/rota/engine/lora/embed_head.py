"""Embedding and head of adapters: factors, rows or matrices of their own, which lie in slots of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rota.core.adapter import Extra
from rota.engine.device import zeros
from rota.engine.lora.base import BaseEmbedHead
from rota.engine.lora.copies import copy_lines
from rota.engine.lora.gain_bias import SlotGainBias, apply_gain_bias
from rota.engine.lora.host import EmbedHeadFactors, HostAdapter
from rota.engine.lora.layout import SiteFactors
from rota.engine.model.sites import SiteShape
from rota.engine.model.spec import ModelSpec
from rota.engine.step.device_step import LoraBatch

# ── own matrices ────────────────────────────────────────────────────────────────────────────────────────────────────
# Own matrices are an embedding or a head of an adapter's own, in the place of the model's (PEFT's modules_to_save).
#
#     places    | 0           | 1          |          each [vocabulary, hidden]: a gigabyte of an 8B with 128,256 tokens
#     slot 0    its embedding   its head
#     slot 1    has neither
#
# They are too large to have one for every slot: the scheduler's ledger gives places as it gives pages, and as many
# slots are open as the places allow. A rank's head is the beginning of a place.

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


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Ends are the embedding and the head: some adapters have factors there too, which lie in slots of their own.
#
#     embedding    x = E[token] + A[token] B           A is looked up as the embedding is: [vocabulary, rank]
#     head         logits = x Hᵀ + (x Aᵀ) B            a site like any other, for the rows that sample
#
# A bank has the ends that its first adapters have, and grows by others (growth.py). They lie beside the layers' sites
# and in no pages. An adapter may have a whole matrix of its own instead, as above.

# Adds to y what each token's adapter makes of x.
AddLora = Callable[[Tensor, Tensor, SiteFactors, LoraBatch], None]


def embed_head_bytes(spec: ModelSpec, tokens: int, rank: int, dtype: torch.dtype, extras: Extra) -> int:
    """The bytes of one slot's ends; a rank's head has so many tokens."""
    return sum(
        (inputs + outputs) * rank * dtype.itemsize
        + (2 * outputs * torch.float32.itemsize if Extra.GAIN_BIAS in extras else 0)
        for end, inputs, outputs in (
            (Extra.EMBEDDING, spec.vocab_size, spec.hidden_size),
            (Extra.HEAD, spec.hidden_size, tokens),
        )
        if end in extras
    )


class EmbedHeadBank:
    """The factors of all slots at the ends that are there."""

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        base: BaseEmbedHead,
    ) -> None:
        hidden, vocabulary = spec.hidden_size, spec.vocab_size
        self.base = base
        self._slots, self._max_rank, self._dtype, self._device = slots, max_rank, dtype, device
        self._bytes_for = partial(embed_head_bytes, spec, tokens, max_rank, dtype)
        # The embedding's A lies the other way round than a site's: [slots, vocabulary, max_rank].
        self._make = {
            Extra.EMBEDDING: partial(self._factors, "embed_tokens", vocabulary, (vocabulary, max_rank), hidden),
            Extra.HEAD: partial(self._factors, "lm_head", hidden, (max_rank, hidden), tokens),
        }
        self.embedding: SiteFactors | None = None
        self.head: SiteFactors | None = None
        self._gain_bias: dict[Extra, SlotGainBias] = {}
        self.extras = Extra.NONE
        self.own: OwnMatrices | None = None
        if base.matrices:
            self.own = OwnMatrices(spec, base.matrices, slots, dtype, device)
        self.grow(base.extras)

    @property
    def size_bytes(self) -> int:
        own = 0 if self.own is None else self.own.size_bytes
        return self._slots * self._bytes_for(self.extras) + own

    def grow(self, extras: Extra) -> None:
        """Slots have these from now on, besides what they had; with gains and biases if these are among the extras."""
        extras |= self.extras
        embedding, head = (
            former if end not in extras else self._grown(former, end, Extra.GAIN_BIAS in extras)
            for end, former in ((Extra.EMBEDDING, self.embedding), (Extra.HEAD, self.head))
        )
        self.embedding, self.head, self.extras = embedding, head, extras

    def _grown(self, former: SiteFactors | None, end: Extra, has_gain_bias: bool) -> SiteFactors:
        factors = former or self._make[end]()
        if not has_gain_bias or factors.gain_bias is not None:
            return factors
        made = self._gain_bias[end] = SlotGainBias((factors.shape,), self._slots, 1, self._device)
        return replace(factors, gain_bias=made.at(0, 0))

    def _factors(self, name: str, inputs: int, a: tuple[int, int], outputs: int) -> SiteFactors:
        slots, dtype, device = self._slots, self._dtype, self._device
        ranks = torch.zeros(slots, dtype=torch.int32, device=device)
        b = zeros((slots, self._max_rank, outputs), dtype, device)
        return SiteFactors(SiteShape(name, inputs, ((name, outputs),)), zeros((slots, *a), dtype, device), b, ranks)

    @property
    def has_head(self) -> bool:
        """May an adapter change the logits besides what it does in the layers?"""
        return self.head is not None or self.own is not None

    def copy_in(self, slot: int, adapter: HostAdapter | None, matrices: Sequence[int] = ()) -> None:
        """Replace the slot's factors and matrices, or leave it without; queued as the bank's copies are."""
        if self.own is not None:
            self.own.copy_in(slot, adapter, matrices)
        for end, factors, own in (
            (Extra.EMBEDDING, self.embedding, None if adapter is None else adapter.embedding),
            (Extra.HEAD, self.head, None if adapter is None else adapter.head),
        ):
            if factors is not None:
                self._copy(end, factors, slot, own)

    def _copy(self, end: Extra, factors: SiteFactors, slot: int, own: EmbedHeadFactors | None) -> None:
        rank = 0 if own is None else len(own.b)
        if own is not None:
            a = factors.a[slot]
            (a[:, :rank] if end is Extra.EMBEDDING else a[:rank]).copy_(own.a, non_blocking=True)
            factors.b[slot, :rank].copy_(own.b, non_blocking=True)
        factors.ranks[slot] = rank
        if end in self._gain_bias:
            own_run = None if own is None or own.gain_bias is None else own.gain_bias.view(1, -1)
            self._gain_bias[end].copy_in(slot, own_run)


class EmbedHead:
    """Adds what adapters have at the ends, in plain torch; nothing where the bank has no such end."""

    def __init__(self, bank: EmbedHeadBank, add: AddLora) -> None:
        """`add` is for the head."""
        self._bank = bank
        self._add = add

    def embed(self, x: Tensor, token_ids: Tensor, batch: LoraBatch) -> None:
        """x [tokens, hidden] += A[token] B, by each token's adapter."""
        bank, factors = self._bank, self._bank.embedding
        ranks = [] if factors is None else factors.ranks.tolist()
        for slot, first, end in batch.groups:
            tokens = batch.order[first:end]
            if bank.own is not None and (own := bank.own.embedding(slot)) is not None:
                x[tokens] = own[token_ids[tokens]]
            if factors is not None and (rank := ranks[slot]):
                x[tokens] += factors.a[slot, token_ids[tokens], :rank] @ factors.b[slot, :rank]
        if factors is not None and factors.gain_bias is not None:
            apply_gain_bias(x, factors.gain_bias, batch)

    def head(self, logits: Tensor, hidden: Tensor, batch: LoraBatch) -> None:
        """logits [rows, tokens] += (hidden Aᵀ) B, by each row's adapter. A head of its own overwrites them first."""
        if not len(hidden):
            return
        if self._bank.own is not None:
            self._use_own_heads(logits, hidden, self._bank.own, batch)
        if self._bank.head is not None:
            self._add(logits, hidden, self._bank.head, batch)

    def _use_own_heads(self, logits: Tensor, hidden: Tensor, own: OwnMatrices, batch: LoraBatch) -> None:
        """logits [rows, tokens] = hidden Hᵀ, for rows whose adapter has a head of its own."""
        for slot, first, end in batch.groups:
            if (matrix := own.head(slot)) is not None:
                rows = batch.order[first:end]
                logits[rows] = functional.linear(hidden[rows], matrix[: logits.shape[1]])
