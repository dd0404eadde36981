"""Vectors in eight bits: each has a scale of its own, and none of any size is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.engine.layer_cache import EIGHT_BITS, from_eight_bits, in_eight_bits

# Three bits behind the leading one: half a step is a sixteenth of a number, and near zero half of 2**-9 of a scale.
STEP, SMALLEST_STEP = 2.0**-4, 2.0**-10


@settings(max_examples=50)
@given(st.integers(-90, 90), st.integers(0, 1000))
def test_every_number_is_within_a_sixteenth_of_itself_or_the_smallest_step_of_its_vector(exponent, seed):
    vectors = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scales = in_eight_bits(vectors)
    error = (from_eight_bits(codes, scales, torch.float32) - vectors).abs()
    assert codes.dtype is EIGHT_BITS
    assert (error <= 1.001 * torch.maximum(STEP * vectors.abs(), SMALLEST_STEP * scales[:, None])).all()


def test_the_largest_number_of_a_vector_is_kept_as_it_is():
    vectors = torch.tensor([[3.0, -7.0, 0.5], [0.001, 0.0, -0.002]])
    found = from_eight_bits(*in_eight_bits(vectors), torch.float32)
    torch.testing.assert_close(found[[0, 1], [1, 2]], vectors[[0, 1], [1, 2]])


def test_a_vector_of_zeros_has_a_scale_of_one():
    codes, scales = in_eight_bits(torch.zeros(2, 3, 16))
    assert (scales == 1.0).all()
    assert not from_eight_bits(codes, scales, torch.float32).any()


@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38, 1e-32])
def test_vectors_next_to_nothing_stay_numbers(tiny):
    codes, scales = in_eight_bits(torch.full((1, 8), tiny))
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert (from_eight_bits(codes, scales, torch.float32).abs() <= 1.1 * tiny).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_reads_as_not_a_number(bad):
    vectors = torch.ones(2, 8)
    vectors[0, 3] = bad
    found = from_eight_bits(*in_eight_bits(vectors), torch.bfloat16)
    assert found[0].isnan().all()
    assert found[1].eq(1.0).all()
