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

SITES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One stacked projection: what goes in, and how wide each of its parts comes out."""

    name: str
    inputs: int
    parts: tuple[tuple[str, int], ...]  # ("q_proj", heads * head_dim), …

    @property
    def outputs(self) -> int:
        return sum(width for _, width in self.parts)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(width for _, width in self.parts)


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


# By identity, not by value: what is worked out for a batch once is found again at its every site.
@dataclass(frozen=True, slots=True, eq=False)
class LoraBatch:
    """Which slot each token of a step belongs to, and the same tokens grouped into tiles of one slot each.

    Tokens of the base model are in no tile and cost nothing. All tensors are inputs, none a constant: a captured
    graph serves any assignment. Unused tiles come last and have a count of 0.
    """

    token_slots: Tensor  # [tokens] int32; base tokens have the value `slots` (one past the last)
    order: Tensor  # [tokens] int32, token indices sorted by slot
    tile_slots: Tensor  # [tiles] int32
    tile_starts: Tensor  # [tiles] int32, where a tile begins in `order`
    tile_counts: Tensor  # [tiles] int32, tokens in it, at most tile_size
    tile_size: int
    # Host copy of the groups, for code that loops: (slot, first, end) in `order`, end not included.
    groups: tuple[tuple[int, int, int], ...]
