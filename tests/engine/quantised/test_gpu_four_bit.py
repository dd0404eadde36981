"""A product of a GPU by a matrix in four bits is the product by the matrix that the codes stand for."""

from __future__ import annotations

import pytest
import torch

from rota.engine.quantised.products import four_bit_linear
from tests.engine.quantised.few_bits import random_codes, relative_error

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
