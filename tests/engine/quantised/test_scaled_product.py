"""Rows are rounded on a GPU as the reference rounds them; the product that follows is torch's."""

from __future__ import annotations

import pytest
import torch

from rota.engine.quantised.packing import in_word_order, pack_eight_bits
from rota.engine.quantised.products import in_eight_bit_floats, product_reference, rounded_rows
from tests.engine.quantised.few_bits import relative_error
from tests.engine.triton_interpreter import DEVICE, load

scaled_product = load("rota.engine.quantised.scaled_product")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (17, 80)])
def test_rows_are_rounded_as_the_reference_rounds_them(rows, width, dtype):
    torch.manual_seed(0)
    x = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(DEVICE, dtype)
    # On a GPU torch divides by a number by multiplying, and the last bit may differ.
    found, expected = scaled_product.round_rows(x), rounded_rows(x.cpu())
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.cpu().float(), in_word_order(expected.codes).float())


def test_zeros_and_rows_that_lie_apart():
    wide = torch.randn(4, 192).to(DEVICE)
    x = wide[:, 64:128]
    x[1] = 0.0
    found, expected = scaled_product.round_rows(x), rounded_rows(x)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes.float(), in_word_order(expected.codes).float())
    assert found.codes[1].float().eq(0.0).all()


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
    torch.manual_seed(0)
    matrix = in_eight_bit_floats(torch.randn(48, 272).to(DEVICE))
    x = torch.randn(rows, 272).to(DEVICE, dtype)
    bias = torch.randn(48).to(DEVICE, dtype) if has_bias else None
    found = scaled_product.ScaledProduct(pack_eight_bits(matrix))(x, bias)
    expected = product_reference(rounded_rows(x), matrix) + (0.0 if bias is None else bias.float())
    assert found.dtype is dtype
    assert relative_error(found, expected) < 6e-3
