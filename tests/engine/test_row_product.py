"""Rows times a matrix whose inputs are shared among programs: on the GPU if there is one, or interpreted."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.engine.quantised.few_bits import relative_error
from tests.engine.triton_interpreter import DEVICE, load

row_product = load("rota.engine.row_product")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "dtype", "shape"),
    [
        # columns, shares, step
        (64, 256, 1, torch.bfloat16, (64, 1, 128)),
        (80, 512, 3, torch.float16, (64, 2, 128)),
        (144, 768, 40, torch.bfloat16, (128, 4, 64)),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_numbers_of_16_bits_are_multiplied_as_they_are(outputs, inputs, rows, dtype, shape, has_bias):
    """Twice, because what a product leaves behind must not reach the next; x may be a part of a wider tensor."""
    torch.manual_seed(0)
    matrix = torch.randn(outputs, inputs).to(DEVICE, dtype)
    x = torch.randn(rows, inputs + 16).to(DEVICE, dtype)[:, :inputs]
    bias = torch.randn(outputs).to(DEVICE, dtype) if has_bias else None
    columns, shares, step = shape
    tuning = row_product.RowTuning(columns=columns, shares=shares, step=step, stages=2, warps=4)
    ended = torch.zeros(-(-outputs // columns), dtype=torch.int32, device=DEVICE)
    multiply = partial(row_product.multiply_rows, x, matrix, None, bias, ended, tuning, dtype)

    first, second = multiply(), multiply()

    expected = x.float() @ matrix.float().T + (0.0 if bias is None else bias.float())
    assert first.dtype is dtype
    assert relative_error(first, expected) < BOUNDS[dtype]
    assert torch.equal(first, second)
    assert not ended.any()
