"""A matrix in groups is the matrix, but for what rounding takes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rota.engine.quantised.groups import GROUP, Groups, in_eight_bits, in_four_bits, packed, side_by_side, stacked


def matrix(outputs: int = 24, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def halves(groups: Groups) -> torch.Tensor:
    """The matrix that two side by side stand for."""
    upper, lower = groups.weights().chunk(2, dim=1)
    return upper + lower


def test_codes_lie_two_to_a_byte_and_come_back():
    codes = torch.arange(16).repeat(2, 4)
    groups = Groups(packed(codes), torch.ones(2, 2), torch.zeros(2, 2))
    assert groups.codes.shape == (2, 32)
    assert groups.codes[0, 0] == 0 + 16 * 1
    assert torch.equal(groups.unpacked(), codes.to(torch.uint8))
    assert (groups.outputs, groups.inputs) == (2, 64)


@given(seed=st.integers(0, 1000), spread=st.floats(1e-6, 1e4))
def test_a_weight_in_four_bits_is_off_by_half_a_step_at_most(seed, spread):
    weight = spread * matrix(seed=seed)
    groups = in_four_bits(weight)
    steps = groups.scales.repeat_interleave(GROUP, dim=1)
    # Scales lie in bfloat16: the last code of a group may fall short of its largest weight by a sixteenth of a step.
    assert ((groups.weights() - weight).abs() <= 0.57 * steps + 1e-6 * spread).all()


@given(seed=st.integers(0, 1000))
def test_a_weight_in_eight_bits_is_off_by_half_a_step_at_most(seed):
    weight = matrix(seed=seed)
    groups = in_eight_bits(weight)
    steps = groups.scales[:, 3:].repeat_interleave(GROUP, dim=1)
    assert ((halves(groups) - weight).abs() <= steps).all()
    assert float(((halves(groups) - weight) / weight.std()).abs().mean()) < 0.01


def test_eight_bits_are_two_matrices_of_four_side_by_side():
    codes = torch.arange(-128, 128).to(torch.int8).view(4, 64)
    scales = torch.rand(4, 2)
    groups = side_by_side(codes, scales)
    assert torch.allclose(halves(groups), codes.float() * scales.repeat_interleave(GROUP, dim=1))


def test_a_group_of_equal_weights_is_exact():
    weight = torch.full((1, GROUP), -0.75)
    assert torch.equal(in_four_bits(weight).weights(), weight)
    assert torch.equal(in_four_bits(torch.zeros(1, GROUP)).weights(), torch.zeros(1, GROUP))
    assert torch.equal(halves(in_eight_bits(torch.zeros(1, GROUP))), torch.zeros(1, GROUP))


def test_matrices_of_the_same_inputs_lie_one_below_the_other():
    first, second = in_four_bits(matrix(8)), in_four_bits(matrix(16))
    both = stacked([first, second])
    assert torch.equal(both.weights(), torch.cat((first.weights(), second.weights())))
    assert stacked([first]) is first
