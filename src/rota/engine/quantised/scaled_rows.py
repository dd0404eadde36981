"""The product of some ten to some hundred rows in eight-bit floats, x rounded row by row.

Torch's scaled product cuts only the outputs. Of Llama-8B's matrices three have too few of them for all processors of an
H200: at 64 rows it takes 102 µs for a layer's four, and `row_product.py` 73.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rota.engine.quantised.codes import Scaled
from rota.engine.quantised.packing import Packed
from rota.engine.row_product import RowTuning, multiply_rows


def divides(packed: Packed, step: int) -> bool:
    """Whether a matrix in eight bits is read in whole steps."""
    return packed.bits == 8 and packed.inputs % step == 0


def multiply_scaled(
    x: Scaled, packed: Packed, bias: Tensor | None, ended: Tensor, tuning: RowTuning, dtype: torch.dtype
) -> Tensor:
    """[rows, inputs], in the order of words (`packing.py`) as the matrix -> [rows, outputs]; as `multiply_rows`."""
    assert packed.bits == 8
    codes = packed.words.view(torch.float8_e4m3fn).view(packed.outputs, packed.inputs)
    return multiply_rows(x.codes, codes, (x.scales, packed.marks), bias, ended, tuning, dtype)
