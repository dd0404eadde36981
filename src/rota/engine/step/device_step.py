"""A step as the device sees it: a plan's rows turned into tensors.

Tokens of one step lie in one line, decodes first, then chunks one after the other:

    tokens   d0 d1 d2 | c0 c0 c0 c0 | c1 c1
    rows      7  2  5 |      9      |   4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# ── lora batch ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A LoraBatch says which adapter slot each token of a step goes through.

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


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The chunks of a step; their keys and values, cached prefix included, are read from the paged cache."""

    rows: Tensor  # [chunks] int32
    starts: Tensor  # [chunks] int32, tokens already in the cache before the chunk
    offsets: Tensor  # [chunks + 1] int32, where each chunk begins among the prefill tokens
    longest: int  # tokens of the longest chunk
    # The same three on the host, for code that loops over chunks.
    host_rows: tuple[int, ...]
    host_starts: tuple[int, ...]
    host_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Everything a forward pass needs besides weights and cache."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    addresses: Tensor  # [tokens] int64, where a token's key and value go: block * block_size + offset
    tables: Tensor  # [rows + 1, pages] int32, the page table of every row; the last row is padding's
    decode_rows: Tensor  # [decodes] int32
    decode_lengths: Tensor  # [decodes] int32, tokens attended to, the new one included
    prefill: PrefillPart | None = None
    lora: LoraBatch | None = None  # None where every token is the base model's

    @property
    def decodes(self) -> int:
        return self.decode_rows.shape[0]


def int32(values: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
