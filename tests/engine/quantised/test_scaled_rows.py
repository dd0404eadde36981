"""Rows and a matrix in eight bits are multiplied in shares: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch

from rota.engine.quantised.packing import pack_eight_bits
from rota.engine.quantised.products import in_eight_bit_floats, product_reference, rounded_rows
from tests.engine.quantised.few_bits import relative_error
from tests.engine.triton_interpreter import DEVICE, load

few_rows = load("rota.engine.quantised.few_rows")
packed_product = load("rota.engine.quantised.packed_product")
scaled_product = load("rota.engine.quantised.scaled_product")
row_product = load("rota.engine.row_product")
scaled_rows = load("rota.engine.quantised.packed_product")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "dtype", "shape", "has_bias"),
    [
        # columns, shares, step
        (64, 256, 17, torch.bfloat16, (64, 1, 256), True),
        (80, 512, 3, torch.float16, (64, 2, 128), False),
        (144, 768, 20, torch.bfloat16, (128, 4, 128), True),
        (16, 256, 130, torch.float16, (64, 2, 128), False),
    ],
)
def test_the_product_is_that_of_the_codes(outputs, inputs, rows, dtype, shape, has_bias):
    """Twice, because what a product leaves behind must not reach the next."""
    matrix = in_eight_bit_floats(torch.randn(outputs, inputs).to(DEVICE))
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    bias = torch.randn(outputs).to(DEVICE, dtype) if has_bias else None
    packed, (columns, shares, step) = pack_eight_bits(matrix), shape
    ended = few_rows.ended_for(packed)
    tuning = row_product.RowTuning(columns=columns, shares=shares, step=step, stages=2, warps=4)

    first, second = (
        scaled_rows.multiply_scaled(scaled_product.round_rows(x), packed, bias, ended, tuning, dtype) for _ in range(2)
    )

    expected = product_reference(rounded_rows(x), matrix) + (0.0 if bias is None else bias.float())
    assert first.dtype is dtype
    assert relative_error(first, expected) < BOUNDS[dtype]
    assert torch.equal(first, second)
    assert not ended.any()


def test_a_row_that_is_not_finite_leaves_its_neighbours():
    matrix = in_eight_bit_floats(torch.randn(64, 256).to(DEVICE))
    packed, x = pack_eight_bits(matrix), torch.randn(20, 256).to(DEVICE, torch.bfloat16)
    product = packed_product.PackedProduct(packed, scaled_product.ScaledProduct(packed))
    (way, *_) = product.tunings(20)
    expected = product.computed(x, None, way)
    x[1, 7] = torch.inf
    found = product.computed(x, None, way)
    assert not found[1].isfinite().any()
    assert torch.equal(found[2:], expected[2:])


def test_a_matrix_is_tried_only_in_steps_that_divide_it(monkeypatch):
    monkeypatch.setattr(packed_product, "processors_of", lambda _: 132)

    def tried(outputs: int, inputs: int, rows: int) -> set[tuple[int, int, int]]:
        packed = pack_eight_bits(in_eight_bit_floats(torch.zeros(outputs, inputs)))
        return {(one.columns, one.shares, one.step) for one in packed_product.tunings_for(packed, rows)}

    assert tried(4096, 4096, 64) == {(64, 2, 256), (128, 4, 128)}
    assert tried(4096, 384, 64) == {(128, 1, 128)}
    assert tried(4096, 576, 64) == set()
