"""A product in few bits is the product of what rounding or the codes leave, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rota.engine.quantised.codes import Scaled
from rota.engine.quantised.products import (
    LARGEST,
    eight_bit_linear,
    fits_eight_bits,
    four_bit_linear,
    in_eight_bit_floats,
    rounded_rows,
)
from tests.engine.nearness import relative_error
from tests.engine.quantised.few_bits import random_codes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(rows: int, columns: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), spread=st.floats(1e-25, 1e25))
def test_a_number_is_off_by_a_sixteenth_of_itself_at_most(seed, spread):
    weight = random(5, 48, seed, spread)
    for rounded in (in_eight_bit_floats(weight), rounded_rows(weight)):
        # Below the normal numbers of the format, steps are 2**-9 wide.
        bound = (weight.abs() / 16).maximum(rounded.scales[:, None] * 2.0**-10)
        assert ((rounded.weights() - weight).abs() <= bound * 1.0001).all()
        assert rounded.codes.float().abs().amax(1).eq(LARGEST).all(), "the largest number of a row is exact"


def test_zeros_stay_zeros():
    matrix = in_eight_bit_floats(torch.zeros(3, 16))
    assert matrix.scales.eq(1.0).all()
    assert matrix.weights().eq(0.0).all()
    assert eight_bit_linear(matrix)(torch.zeros(2, 16)).eq(0.0).all()
    assert eight_bit_linear(in_eight_bit_floats(random(16, 16)))(torch.zeros(2, 16)).eq(0.0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_its_neighbours(bad):
    linear, x = eight_bit_linear(in_eight_bit_floats(random(32, 64))), random(3, 64)
    expected = linear(x)
    x[1, 7] = bad
    found = linear(x)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_near_the_exact_one_and_has_the_type_of_x(dtype, has_bias):
    weight, x, bias = random(48, 256), random(7, 256, 1).to(dtype), random(1, 48, 2)[0].to(dtype)
    linear = eight_bit_linear(in_eight_bit_floats(weight), bias if has_bias else None)
    expected = x.float() @ weight.T + (bias.float() if has_bias else 0.0)
    found = linear(x)
    assert found.dtype is dtype
    assert float((found.float() - expected).norm() / expected.norm()) < 0.05


def test_each_row_has_its_own_scale():
    linear, x = eight_bit_linear(in_eight_bit_floats(random(16, 64))), random(2, 64)
    torch.testing.assert_close(linear(x * torch.tensor([[1.0], [2.0**20]]))[1], linear(x)[1] * 2.0**20)


def test_bytes_are_those_of_codes_scales_and_bias():
    matrix = in_eight_bit_floats(random(32, 64))
    assert eight_bit_linear(matrix).size_bytes == 32 * 64 + 32 * 4
    assert eight_bit_linear(matrix, torch.zeros(32, dtype=torch.bfloat16)).size_bytes == 32 * 64 + 32 * 6


def test_the_matrix_of_a_folder_is_taken_as_it_is():
    codes = random(16, 32).to(torch.float8_e4m3fn)
    scales = torch.rand(16)
    x = torch.eye(32) * LARGEST
    torch.testing.assert_close(eight_bit_linear(Scaled(codes, scales))(x).T / LARGEST, codes.float() * scales[:, None])


def test_sizes_that_tensor_cores_take_fit():
    assert fits_eight_bits(6144, 4096)
    assert not fits_eight_bits(6144, 4097)
    assert not fits_eight_bits(72, 4096)


BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("group", [32, 128, None])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_product_is_that_of_the_weights(dtype, group, is_shuffled):
    codes = random_codes(33, 256, group, is_shuffled=is_shuffled)
    x, bias = torch.randn(5, 256).to(dtype), torch.randn(33).to(dtype)
    found = four_bit_linear(codes, bias, dtype)(x)
    assert found.dtype is dtype
    assert relative_error(found, x.float() @ codes.weights().T + bias.float()) < BOUNDS[dtype]
