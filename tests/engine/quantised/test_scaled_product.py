"""Rows are rounded, and multiplied in shares by a matrix in eight bits or in 16, as the reference does it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rota.engine.quantised.packing import in_word_order, pack_eight_bits
from rota.engine.quantised.products import in_eight_bit_floats, product_reference, rounded_rows
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

few_rows = load("rota.engine.quantised.few_rows")
packed_product = load("rota.engine.quantised.packed_product")
row_product = load("rota.engine.row_product")
scaled_product = load("rota.engine.quantised.scaled_product")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (17, 80)])
def test_rows_are_rounded_as_the_reference_rounds_them(rows, width, dtype):
    assert_rounded_like_the_reference(
        (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(DEVICE, dtype)
    )


def test_zeros_and_rows_that_lie_apart():
    wide = torch.randn(4, 192).to(DEVICE)
    x = wide[:, 64:128]
    x[1] = 0.0
    assert_rounded_like_the_reference(x)
    assert scaled_product.round_rows(x).codes[1].float().eq(0.0).all()


def assert_rounded_like_the_reference(x: Tensor) -> None:
    """The reference on the CPU: on a GPU torch divides by a number by multiplying, and the last bit may differ."""
    found, expected = scaled_product.round_rows(x), rounded_rows(x.cpu())
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.cpu().float(), in_word_order(expected.codes).float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_scale(bad):
    x = torch.randn(3, 64).to(DEVICE)
    expected = scaled_product.round_rows(x)
    x[1, 7] = bad
    found = scaled_product.round_rows(x)
    assert found.scales[1].isnan()
    assert torch.equal(found.scales[::2], expected.scales[::2])
    assert torch.equal(found.codes[::2].float(), expected.codes[::2].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_s_product_multiplies_rows_and_a_matrix_in_the_same_order(rows, dtype, has_bias):
    matrix = in_eight_bit_floats(torch.randn(48, 272).to(DEVICE))
    x = torch.randn(rows, 272).to(DEVICE, dtype)
    bias = torch.randn(48).to(DEVICE, dtype) if has_bias else None
    found = scaled_product.ScaledProduct(pack_eight_bits(matrix))(x, bias)
    expected = product_reference(rounded_rows(x), matrix) + (0.0 if bias is None else bias.float())
    assert found.dtype is dtype
    assert relative_error(found, expected) < 6e-3


# Rows and a matrix in eight bits are multiplied in shares: on the GPU where there is one, else interpreted.


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
        packed_product.multiply_scaled(scaled_product.round_rows(x), packed, bias, ended, tuning, dtype)
        for _ in range(2)
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


# Rows times a matrix whose inputs are shared among programs: on the GPU if there is one, or interpreted.


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
