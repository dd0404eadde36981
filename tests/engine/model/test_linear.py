from __future__ import annotations

import pytest
import torch

from rota.engine.model.linear import Linear, projection


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 65, 100])
def test_a_product_has_the_rows_it_was_asked_for_whatever_it_is_padded_to(rows):
    weight, bias = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16)
    x = torch.randn(rows, 16, dtype=torch.bfloat16)

    product = projection(weight, bias)(x)

    assert product.is_contiguous()
    torch.testing.assert_close(product, Linear(weight, bias)(x), rtol=2e-2, atol=2e-2)
