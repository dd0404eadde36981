"""On a GPU, products by matrices in few bits agree with float32 for any number of rows, in graphs and outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rota.engine.model.linear import tune_gemms
from rota.engine.quantised.packed_product import TRIED_ROWS
from rota.engine.quantised.products import (
    eight_bit_linear,
    four_bit_linear,
    in_eight_bit_floats,
    product_reference,
    rounded_rows,
)
from rota.engine.row_product import RowTuning
from tests.engine.nearness import relative_error
from tests.engine.quantised.few_bits import on_device, random_codes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CI has none")

ROWS = [1, 3, 16, 17, 64, 129, 512]
DTYPES = [torch.bfloat16, torch.float16]
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Rounding x to eight bits: a number is off by 1/16 at most, a sum of many by much less.
ROUNDING = 0.04


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def replayed(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a graph computes that was captured with other numbers, at its second replay."""
    given = torch.zeros_like(x)
    call(given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(given)
    graph.replay()
    given.copy_(x)
    graph.replay()
    return y.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 4096), (656, 576)])
def test_eight_bits(outputs, inputs, rows, dtype):
    matrix = in_eight_bit_floats(random(outputs, inputs, dtype=torch.float32))
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    linear = eight_bit_linear(matrix, bias)
    found = linear(x)
    assert found.dtype is dtype
    assert relative_error(found, x.float() @ matrix.weights().T + bias.float()) < ROUNDING
    assert relative_error(replayed(linear, x), found.float()) < 1e-6


@pytest.mark.parametrize("rows", ROWS)
def test_each_way_in_eight_bits_has_the_error_of_its_own_rounding_alone(rows):
    matrix = in_eight_bit_floats(random(1024, 4096, dtype=torch.float32))
    x, product = random(rows, 4096), eight_bit_linear(matrix)._product
    rounded = product.computed(x, None, None)
    assert relative_error(rounded, product_reference(rounded_rows(x), matrix)) < BOUNDS[torch.bfloat16]
    exact, coarse = x.float() @ matrix.weights().T, product_reference(rounded_rows(x), matrix)
    for tuning in product.tunings(rows) if rows <= TRIED_ROWS[-1] else ():
        found = product.computed(x, None, tuning)
        expected = coarse if isinstance(tuning, RowTuning) else exact
        assert relative_error(found, expected) < BOUNDS[torch.bfloat16], tuning


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "is_shuffled"),
    [(1000, 4096, 128, False), (656, 1024, 64, True), (333, 576, 32, False), (129, 1536, None, False)],
)
def test_four_bits(outputs, inputs, group, is_shuffled, rows, dtype):
    codes = on_device(random_codes(outputs, inputs, group, is_shuffled=is_shuffled), "cuda")
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
    linear = four_bit_linear(codes, bias, dtype)
    found = linear(x)
    assert found.dtype is dtype
    assert relative_error(found, x.float() @ codes.weights().T + bias.float()) < BOUNDS[dtype]
    assert relative_error(replayed(linear, x), found.float()) < 1e-6


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 128, 200, 256])
def test_every_shape_of_the_kernel_in_four_bits(rows):
    codes = on_device(random_codes(1024, 4096), "cuda")
    x, product = random(rows, 4096), four_bit_linear(codes, None, torch.bfloat16)._product
    for tuning in (*product.tunings(rows), None):
        found = product.computed(x, None, tuning)
        assert relative_error(found, x.float() @ codes.weights().T) < BOUNDS[torch.bfloat16], tuning


def test_a_matrix_that_the_kernel_does_not_know_is_kept_whole():
    codes = on_device(random_codes(64, 256, 64, has_whole_zeros=False), "cuda")
    linear, x = four_bit_linear(codes, None, torch.bfloat16), random(3, 256)
    assert relative_error(linear(x), x.float() @ codes.weights().T) < BOUNDS[torch.bfloat16]
    assert linear.size_bytes == 2 * 64 * 256


@pytest.mark.parametrize("rows", [3, 100])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_no_number_and_leaves_its_neighbours(rows, bad):
    x = random(rows, 512)
    codes = on_device(random_codes(128, 512), "cuda")
    matrix = in_eight_bit_floats(random(128, 512, dtype=torch.float32))
    for linear in (eight_bit_linear(matrix), four_bit_linear(codes, None, torch.bfloat16)):
        expected, spoilt = linear(x), x.clone()
        spoilt[1, 7] = bad
        found = linear(spoilt)
        assert not found[1].isfinite().any()
        assert torch.equal(found[2:], expected[2:])
        assert torch.equal(found[0], expected[0])


def test_products_are_right_after_they_were_tried_out():
    codes = [on_device(random_codes(1024, 2048), "cuda") for _ in range(3)]
    matrices = [in_eight_bit_floats(random(1024, 2048, dtype=torch.float32)) for _ in range(3)]
    four, eight = (
        [four_bit_linear(one, None, torch.bfloat16) for one in codes],
        list(map(eight_bit_linear, matrices)),
    )
    for linears in (four, eight):
        tune_gemms(linears, [1, 16, 64, 512])
    for rows in ROWS:
        x = random(rows, 2048)
        for linear, made in (*zip(four, codes, strict=True), *zip(eight, matrices, strict=True)):
            assert relative_error(linear(x), x.float() @ made.weights().T) < ROUNDING


def test_the_same_rows_give_the_same_numbers_every_time():
    """Shares are added in their order, whichever program ends last."""
    four = four_bit_linear(on_device(random_codes(1024, 4096), "cuda"), None, torch.bfloat16)
    eight = eight_bit_linear(in_eight_bit_floats(random(1024, 4096, dtype=torch.float32)))._product
    ways = [partial(eight.computed, bias=None, way=way) for rows in (16, 64, 256) for way in eight.tunings(rows)]
    x = random(16, 4096)
    for call in (four, *ways):
        first = call(x)
        assert all(torch.equal(call(x), first) for _ in range(50))
