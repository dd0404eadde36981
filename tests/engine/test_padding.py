"""A server meets every length of prompt there is; what the CPU's libraries compile for them must stay a handful."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rota.engine.attention.torch_attention import TorchAttention
from rota.engine.lora.batch import make_batch
from rota.engine.lora.layout import SiteFactors
from rota.engine.lora.reference import add_lora
from rota.engine.model.linear import Linear, PackedLinear, projection
from rota.engine.model.sites import SiteShape
from rota.engine.padding import padded_rows
from tests.engine.attention.paged import paged_cache, prefill_step

SIZES = {padded_rows(length) for length in range(1, 257)}
# The shortest and the longest length of each size: sizes grow with lengths, so those between have the same.
LENGTHS = sorted(SIZES | {length for length in range(1, 257) if padded_rows(length - 1) < padded_rows(length)})
SITE = SiteShape("qkv", 32, (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)))
COMPILED = ("mm", "addmm", "linear_pointwise", "attention")


class Compiled(TorchDispatchMode):
    """Remembers the operations and shapes that torch would compile for, and computes oneDNN's product in plain torch.

    So it does not matter what the processor at hand has arithmetic for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(operation) for name in COMPILED):
            shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]
            self.shapes.add((str(operation), *shapes))
        if "linear_pointwise" in str(operation):
            x, weight, *_ = args
            return (x.float() @ weight.float().T).to(x.dtype)
        return operation(*args, **(kwargs or {}))


def test_hundreds_of_sizes_become_a_few():
    padded = [padded_rows(rows) for rows in range(1, 2049)]

    assert all(0 <= given - rows < max(8, rows / 4) for rows, given in enumerate(padded, start=1))
    assert padded[:8] == list(range(1, 9))
    assert padded == sorted(padded)
    assert len(set(padded)) < 45


def test_prompts_of_every_length_take_few_products():
    product = PackedLinear(torch.randn(SITE.outputs, SITE.inputs, dtype=torch.bfloat16))

    with Compiled() as compiled:
        for length in LENGTHS:
            assert len(product(torch.randn(length, SITE.inputs, dtype=torch.bfloat16))) == length

    assert len(compiled.shapes) == len(SIZES)


def test_prompts_of_every_length_take_few_products_with_adapters():
    a, b = torch.randn(2, 3 * 8, SITE.inputs), torch.randn(2, 8, SITE.outputs)
    factors = SiteFactors(SITE, a.bfloat16(), b.bfloat16(), torch.tensor([8, 4], dtype=torch.int32))

    with Compiled() as compiled:
        for length in LENGTHS:
            batch = make_batch(np.full(length, length % 2, np.int32), 2, torch.device("cpu"))
            x = torch.randn(length, SITE.inputs, dtype=torch.bfloat16)
            add_lora(torch.zeros(length, SITE.outputs, dtype=torch.bfloat16), x, factors, batch)

    # Two for each adapter's rank.
    assert len(SIZES) <= len(compiled.shapes) <= 4 * len(SIZES)


def test_prompts_of_every_length_attend_in_few_sizes():
    cache = paged_cache([max(LENGTHS)], 2, 32, 16, torch.bfloat16, "cpu")
    attention = TorchAttention(0.2)

    with Compiled() as compiled:
        for length in LENGTHS:
            query = torch.randn(length, 4, 32, dtype=torch.bfloat16)
            found = attention.prefill(query, cache.layer, prefill_step(cache, [(0, 0, length)]))
            assert found.shape == query.shape

    assert 0 < len(compiled.shapes) <= len(SIZES)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33, 65, 100])
def test_a_product_has_the_rows_it_was_asked_for_whatever_it_is_padded_to(rows):
    weight, bias = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16)
    x = torch.randn(rows, 16, dtype=torch.bfloat16)

    product = projection(weight, bias)(x)

    assert product.is_contiguous()
    torch.testing.assert_close(product, Linear(weight, bias)(x), rtol=2e-2, atol=2e-2)
