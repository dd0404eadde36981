"""A few sizes instead of hundreds: a CPU's libraries compile and keep a product for every number of rows.

In bf16 on a Xeon with AMX (torch 2.13): two milliseconds and a quarter of a megabyte for each size of each matrix, and
1.5 GB for the attention of a thousand prompt lengths with SmolLM2's heads, of which torch never lets go.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

# Rows up to so many come in steps of so many: at most seven rows or a quarter more, and none where decodes are.
STEPS = ((8, 1), (64, 8), (128, 16), (512, 32))
STEP = 128


def padded_rows(rows: int) -> int:
    step = next((step for most, step in STEPS if rows <= most), STEP)
    return -(-rows // step) * step


def pad_rows(x: Tensor) -> Tensor:
    """As many rows as `padded_rows` says, the new ones zero; itself if none is missing."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return functional.pad(x, (0,) * (2 * x.dim() - 1) + (missing,)) if missing else x
