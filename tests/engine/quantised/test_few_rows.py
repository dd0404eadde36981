"""The kernels for a packed matrix against float32: on the GPU where there is one, else interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.engine.quantised.codes import Scaled
from rota.engine.quantised.packing import Packed, pack_eight_bits, pack_four_bits, step_of
from rota.engine.quantised.products import in_eight_bit_floats
from tests.engine.quantised.few_bits import on_device, random_codes, relative_error
from tests.engine.triton_interpreter import DEVICE, load

few_rows = load("rota.engine.quantised.few_rows")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def product(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None, **tuning: int) -> torch.Tensor:
    """Twice, because what a product leaves behind must not reach the next."""
    ended = few_rows.ended_for(packed)
    chosen = few_rows.ProductTuning(**{"columns": 64, "shares": 2, **tuning})
    first, second = (few_rows.multiply(x, packed, bias, ended, chosen) for _ in range(2))
    assert torch.equal(first, second)
    assert not ended.any()
    return first


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "rows", "dtype", "columns", "shares"),
    [
        (64, 256, 128, 1, torch.bfloat16, 64, 1),
        (130, 256, 64, 3, torch.float16, 128, 2),
        (33, 192, 32, 16, torch.bfloat16, 64, 4),
        (100, 320, None, 17, torch.bfloat16, 64, 2),
        (65, 512, 256, 64, torch.float16, 128, 1),
        (64, 96, None, 2, torch.bfloat16, 64, 8),
        (130, 128, 64, 150, torch.bfloat16, 128, 2),
    ],
)
def test_four_bits(outputs, inputs, group, rows, dtype, columns, shares):
    codes = on_device(random_codes(outputs, inputs, group), DEVICE)
    x, bias = (torch.randn(*shape).to(DEVICE, dtype) for shape in ((rows, inputs), (outputs,)))
    packed = pack_four_bits(codes, step_of(codes))
    found = product(x, packed, bias, columns=columns, shares=shares)
    assert found.dtype is dtype
    assert relative_error(found, x.float() @ codes.weights().T + bias.float()) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "dtype", "columns", "shares"),
    [
        (64, 256, 1, torch.bfloat16, 64, 1),
        (144, 272, 3, torch.float16, 128, 2),
        (48, 80, 17, torch.bfloat16, 64, 2),
        (16, 512, 64, torch.bfloat16, 64, 4),
    ],
)
def test_eight_bits(outputs, inputs, rows, dtype, columns, shares):
    matrix = in_eight_bit_floats(torch.randn(outputs, inputs).to(DEVICE))
    x = torch.randn(rows, inputs).to(DEVICE, dtype)
    found = product(x, pack_eight_bits(matrix), columns=columns, shares=shares)
    assert relative_error(found, x.float() @ matrix.weights().T) < BOUNDS[dtype]


def test_every_number_of_eight_bits_is_exact():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    codes = torch.cat((every, every[:2])).view(16, 16).to(DEVICE)
    packed = pack_eight_bits(Scaled(codes, torch.ones(16, device=DEVICE)))
    for dtype in BOUNDS:
        assert torch.equal(product(torch.eye(16).to(DEVICE, dtype), packed).float().T, codes.float())


@settings(deadline=None, max_examples=5)
@given(
    outputs=st.integers(1, 140), groups=st.integers(1, 4), width=st.sampled_from([32, 64, 96]), rows=st.integers(1, 40)
)
def test_sizes_of_any_kind(outputs, groups, width, rows):
    codes = on_device(random_codes(outputs, groups * width, width), DEVICE)
    x = torch.randn(rows, groups * width).to(DEVICE, torch.bfloat16)
    packed = pack_four_bits(codes, step_of(codes))
    assert relative_error(product(x, packed), x.float() @ codes.weights().T) < BOUNDS[torch.bfloat16]


def test_rows_may_lie_apart():
    codes = on_device(random_codes(64, 128, 64), DEVICE)
    x = torch.randn(5, 300).to(DEVICE, torch.bfloat16)[:, 100:228]
    packed = pack_four_bits(codes, step_of(codes))
    assert torch.equal(product(x, packed), product(x.contiguous(), packed))


def test_a_row_that_is_not_finite_leaves_its_neighbours():
    codes = on_device(random_codes(64, 128, 64), DEVICE)
    packed, x = pack_four_bits(codes, step_of(codes)), torch.randn(3, 128).to(DEVICE, torch.bfloat16)
    expected = product(x, packed)
    x[1, 5] = torch.nan
    found = few_rows.multiply(
        x, packed, None, torch.zeros(1, dtype=torch.int32, device=DEVICE), few_rows.ProductTuning(columns=64, shares=2)
    )
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(130, 256, 128), (70, 200, None), (64, 96, 32)])
def test_a_matrix_is_written_out(dtype, outputs, inputs, group):
    codes = on_device(random_codes(outputs, inputs, group), DEVICE)
    packed = pack_four_bits(codes, step_of(codes))
    first = 64 if outputs > 64 else 0
    found = few_rows.written_out(packed, dtype, first, outputs)
    # A scale keeps 15 bits of its mantissa, which may round a weight to its other neighbour.
    bound = max(2.0**-16, torch.finfo(dtype).eps)
    torch.testing.assert_close(found, codes.weights()[first:].to(dtype), rtol=bound, atol=0.0)
