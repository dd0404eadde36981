"""A LoraBatch says which adapter slot each token of a step goes through."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# (slot, first, end) in a batch's order, end not included.
Groups = tuple[tuple[int, int, int], ...]


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
    # Host copy of the groups, for code that loops; a graph has none.
    groups: Groups
