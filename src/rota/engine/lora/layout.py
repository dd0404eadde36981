"""Where adapter weights lie: four sites a layer, each with stacked factors for every slot.

An adapter adds  y += (x @ A.T) @ B  at a site; alpha / rank is folded into B at load. Projections that are one matrix
in the model (q k v; gate up) are one site with several parts, and their factors are stacked likewise:

    qkv      A [slots, 3 * max_rank, hidden]     rows: q's rank, k's rank, v's rank (each padded to max_rank)
             B [slots, max_rank, q + k + v]      columns of a part meet only that part's columns of x @ A.T
    o        A [slots, max_rank, heads * head_dim],  B [slots, max_rank, hidden]
    gate_up  A [slots, 2 * max_rank, hidden],        B [slots, max_rank, 2 * width]
    down     A [slots, max_rank, width],             B [slots, max_rank, hidden]

In both factors one rank of one part is one unbroken line of numbers, so that work and copies for a rank-8 adapter
touch rank-8 bytes: checkpoints keep B the other way, [outputs, rank], and it is turned once, at load.

The operations never look beyond a slot's rank. Where its parts differ in rank, the rows missing of the lesser ones are
zero.
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
    ranks: Tensor  # [slots] int32: the largest rank among the site's parts, 0 where the adapter leaves it alone

    @property
    def max_rank(self) -> int:
        return self.b.shape[1]
