"""A page is room for eight ranks of one adapter: where ranks differ, slots share pages, and each takes what it needs.

    pages     | 0      | 1      | 2      | 3      | 4      |
               slot 1   slot 0   slot 1            slot 1        slot 0 has rank 8, slot 1 has rank 20
    table     slot 0: 1          slot 1: 0 2 4

Rank n of a slot is rank n % 8 of page `table[slot, n // 8]`. The scheduler's ledger gives pages as it gives KV blocks.
"""

from __future__ import annotations

# Eight numbers of two bytes: every page begins at a multiple of 16 bytes, in any precision that a GPU computes in.
PAGE_RANK = 8


def pages_for(rank: int) -> int:
    """How many pages an adapter of this rank takes."""
    return -(-rank // PAGE_RANK)
