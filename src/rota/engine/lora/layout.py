"""The layout of adapter weights: four sites in a layer, each with stacked factors for every slot.

An adapter adds  y += (x @ A.T) @ B  at a site; alpha / rank is folded into B at load. Projections that are one matrix
in the model (q k v; gate up) are one site with several parts, and their factors are stacked in the same way:

    qkv      A [slots, 3 * max_rank, hidden]     rows: q's rank, k's rank, v's rank (each padded to max_rank)
             B [slots, max_rank, q + k + v]      columns of a part meet only that part's columns of x @ A.T
    o        A [slots, max_rank, heads * head_dim],  B [slots, max_rank, hidden]
    gate_up  A [slots, 2 * max_rank, hidden],        B [slots, max_rank, 2 * width]
    down     A [slots, max_rank, width],             B [slots, max_rank, hidden]

In both factors one rank of one part is one contiguous line of numbers. So a rank-8 adapter is computed and copied in
rank-8 bytes. Checkpoints store B as [outputs, rank]; it is transposed once, at load.

The operations never read beyond a slot's rank. Where its parts differ in rank, the missing rows of the smaller parts
are zero.

Where slots share pages (files/ranks.py), `pages` stands above in the place of `slots`, and 8 in that of `max_rank`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from rota.engine.lora.gain_bias import GainBias
from rota.engine.model.sites import SiteShape, site_shapes
from rota.engine.model.spec import ModelSpec

# ── fused LoRA A ────────────────────────────────────────────────────────────────────────────────────────────────────
# A fused LoRA A is room for adapters' A below a model's matrix: one product then gives x Wᵀ and x Aᵀ of every slot.
#
#     x [tokens, inputs]  ·  [ W              ]ᵀ   =   [ x Wᵀ | x A₀ᵀ | x A₁ᵀ | … ]
#                            [ A of slot 0    ]
#                            [ A of slot 1    ]
#                            [ …              ]
#
# Where slots share pages, the pages lie there, one after the other.
#
# A product of few rows takes as long as reading its matrix, and a small bank adds little to that. A fused LoRA A saves
# a kernel and a fork at every site. With six adapters of rank 16 a step of 64 tokens takes 6.81 instead of 7.03 ms, a
# step of 64 tokens and a prompt of 512 takes 17.4 instead of 18.6 (Llama-8B, H200, 2026-11-15). Columns of slots that a
# token does not use are computed too, but never read.

# What an H200 reads in a microsecond: about the cost of the shrink kernel at a site.
LARGEST_BYTES = 4 << 20
# Share of a matrix's own rows: for a prompt, more rows mean more time for multiplications.
LARGEST_SHARE = 1 / 8


def fused_sites(spec: ModelSpec, places: int, rank: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The sites at which this many slots or pages of this rank are worth a fused LoRA A."""

    def is_small(shape: SiteShape) -> bool:
        rows = _rows(shape, places, rank)
        return rows * shape.inputs * dtype.itemsize <= LARGEST_BYTES and rows <= LARGEST_SHARE * shape.outputs

    return tuple(shape.name for shape in site_shapes(spec) if is_small(shape))


def fused_rows(spec: ModelSpec, sites: Collection[str], places: int, rank: int) -> dict[str, int]:
    """The rows of the fused LoRA A at each of these sites."""
    return {shape.name: _rows(shape, places, rank) for shape in site_shapes(spec) if shape.name in sites}


def _rows(shape: SiteShape, places: int, rank: int) -> int:
    return places * len(shape.parts) * rank


# By identity, not by value: what is worked out from factors is kept beside them.
@dataclass(frozen=True, slots=True, eq=False)
class SiteFactors:
    """The factors of every slot at one site of one layer."""

    shape: SiteShape
    a: Tensor  # [places, parts * place_rank, inputs]
    b: Tensor  # [places, place_rank, outputs]
    ranks: Tensor  # [slots] int32: the largest rank of the site's parts, 0 where the adapter has none
    table: Tensor | None = None  # [slots, most pages] int32: the places are pages; None: each is a slot's own
    gain_bias: GainBias | None = None  # None: no adapter has any

    @property
    def place_rank(self) -> int:
        return self.b.shape[1]

    @property
    def max_rank(self) -> int:
        """The largest rank that a slot can have."""
        return self.place_rank if self.table is None else self.place_rank * self.table.shape[1]

    def of_slot(self, slot: int, rank: int) -> tuple[Tensor, Tensor]:
        """The factors of a slot of this rank: A [parts * rank, inputs] and B [rank, outputs]."""
        parts = len(self.shape.parts)
        if self.table is None:
            return self.a[slot].unflatten(0, (parts, -1))[:, :rank].flatten(0, 1), self.b[slot, :rank]
        pages = self.table[slot, : -(-rank // self.place_rank)]
        a = self.a[pages].unflatten(1, (parts, -1)).transpose(0, 1).flatten(1, 2)  # [parts, ranks of the pages, inputs]
        return a[:, :rank].flatten(0, 1), self.b[pages].flatten(0, 1)[:rank]
