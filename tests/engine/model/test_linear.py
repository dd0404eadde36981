from __future__ import annotations

import pytest
import torch

from rota.engine.model.linear import Linear, padded_rows, projection


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 65, 100])
def test_a_product_has_the_rows_it_was_asked_for_whatever_it_is_padded_to(rows):
    weight, bias = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16)
    x = torch.randn(rows, 16, dtype=torch.bfloat16)

    product = projection(weight, bias)(x)

    assert product.is_contiguous()
    torch.testing.assert_close(product, Linear(weight, bias)(x), rtol=2e-2, atol=2e-2)


def test_hundreds_of_sizes_become_a_few():
    padded = [padded_rows(rows) for rows in range(1, 513)]
    assert all(0 <= given - rows < 32 for rows, given in enumerate(padded, start=1))
    assert padded[:8] == list(range(1, 9))
    assert len(set(padded)) < 32
