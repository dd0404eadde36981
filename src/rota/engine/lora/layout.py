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

Where slots share pages (pages.py), `pages` stands above in the place of `slots`, and 8 in that of `max_rank`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rota.engine.lora.trims import Trims
from rota.engine.model.sites import SiteShape


# By identity, not by value: what is worked out from factors is kept beside them.
@dataclass(frozen=True, slots=True, eq=False)
class SiteFactors:
    """The factors of every slot at one site of one layer."""

    shape: SiteShape
    a: Tensor  # [places, parts * place_rank, inputs]
    b: Tensor  # [places, place_rank, outputs]
    ranks: Tensor  # [slots] int32: the largest rank of the site's parts, 0 where the adapter has none
    table: Tensor | None = None  # [slots, most pages] int32: the places are pages; None: each is a slot's own
    trims: Trims | None = None  # None: no adapter has any

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
