"""Numbers are finite if torch says so, whatever their bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.engine.weights.finite import is_finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_counts_as_torch_counts_it(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert is_finite(every[every.isfinite()])
    among_others = torch.zeros(int((~every.isfinite()).sum()), 3, dtype=dtype)
    among_others[:, 1] = every[~every.isfinite()]
    assert not any(is_finite(row) for row in among_others)


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_so_does_every_float(numbers: list[float]):
    values = torch.tensor(numbers, dtype=torch.float32)
    assert is_finite(values) == bool(values.isfinite().all())
    assert is_finite(values.repeat(4, 1)[:, ::2]) == bool(values[::2].isfinite().all())
