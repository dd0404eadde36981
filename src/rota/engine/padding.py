"""Rows are padded to a few sizes, since a CPU's libraries compile and keep a product for every number of rows.

In bf16 on a Xeon with AMX (torch 2.13) each size of each matrix costs two milliseconds and a quarter of a megabyte.
The attention of a thousand prompt lengths with SmolLM2's heads takes 1.5 GB, which torch never frees.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

# (most rows, their step): padding adds at most seven rows or a quarter, and none up to eight rows.
STEPS = ((8, 1), (64, 8), (128, 16), (512, 32))
STEP = 128


def padded_rows(rows: int) -> int:
    step = next((step for most, step in STEPS if rows <= most), STEP)
    return -(-rows // step) * step


def pad_rows(x: Tensor) -> Tensor:
    """`x` with zero rows added up to `padded_rows`; `x` itself if no row is missing."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return functional.pad(x, (0,) * (2 * x.dim() - 1) + (missing,)) if missing else x
