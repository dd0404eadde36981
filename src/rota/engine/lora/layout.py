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
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rota.engine.model.sites import SiteShape


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """The factors of every slot at one site of one layer."""

    shape: SiteShape
    a: Tensor  # [slots, parts * max_rank, inputs]
    b: Tensor  # [slots, max_rank, outputs]
    ranks: Tensor  # [slots] int32: the largest rank of the site's parts, 0 where the adapter has none

    @property
    def max_rank(self) -> int:
        return self.b.shape[1]
