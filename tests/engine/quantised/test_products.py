"""Products in four bits give what they say they give: torch's own beside plain torch."""

from __future__ import annotations

import pytest
import torch

from rota.engine.quantised.groups import Groups, in_eight_bits, in_four_bits
from rota.engine.quantised.matrices import (
    DynamicProduct,
    WeightOnlyProduct,
    dynamic_reference,
    weight_only_reference,
)

PRODUCTS = {
    "dynamic": (DynamicProduct, dynamic_reference),
    "weight-only": (WeightOnlyProduct, weight_only_reference),
}
# A product may sum in another order than the reference; one in bfloat16 then rounds to a neighbour now and then.
TOLERANCE = {"dynamic": 1e-5, "weight-only": 8e-3}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
@pytest.mark.parametrize("make", [in_four_bits, in_eight_bits])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_is_its_reference(kind, make, rows, dtype):
    torch.manual_seed(rows)
    groups: Groups = make(torch.randn(48, 64))
    x = 3 * torch.randn(rows, groups.inputs, dtype=dtype)
    product, reference = PRODUCTS[kind]
    found = product(groups)(x)

    assert found.dtype is dtype
    assert found.shape == (rows, 48)
    assert error(found, reference(x, groups)) < (TOLERANCE[kind] if dtype is torch.float32 else 8e-3)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_is_near_the_exact_one(kind):
    torch.manual_seed(0)
    groups = in_four_bits(torch.randn(64, 256))
    x = torch.randn(5, 256)
    assert error(PRODUCTS[kind][0](groups)(x), x @ groups.weights().T) < 0.02


def test_a_dynamic_product_takes_any_number_of_outputs():
    groups = in_four_bits(torch.randn(33, 64))
    x = torch.randn(2, 64)
    assert error(DynamicProduct(groups)(x), dynamic_reference(x, groups)) < 1e-5


def test_four_bits_take_less_than_a_third_of_what_bfloat16_takes():
    groups = in_four_bits(torch.randn(512, 1024))
    assert WeightOnlyProduct(groups).size_bytes < 0.32 * 2 * 512 * 1024
