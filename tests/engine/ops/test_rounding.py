"""Operations that round what they write: the rows of their twins, and the codes that the product would have made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rota.engine.quantised.codes import carried
from tests.engine.triton_interpreter import DEVICE, load

operations = load("rota.engine.ops.fused")
fused, rounding = operations.FusedOperations(), operations.FusedOperations(rounds=True)
scaled_product = load("rota.engine.quantised.scaled_product")

EPSILON = 1e-5
ROWS = 18


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE, torch.bfloat16)


def check(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)
    mine, theirs = carried(found), scaled_product.round_rows(expected)
    assert mine is not None
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    torch.testing.assert_close(mine.scales, theirs.scales, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_norm_rounds_the_rows_that_it_writes():
    x, weight = random(ROWS, 80), random(80)
    check(rounding.rms_norm(x, weight, EPSILON), fused.rms_norm(x, weight, EPSILON))


def test_so_does_a_norm_that_adds_to_rows_which_lie_apart():
    x, residual, weight = random(ROWS, 96)[:, :64], random(ROWS, 64), random(64)
    x[1, 3] = torch.inf  # its scale is not a number, and no other row's
    expected, expected_total = fused.add_rms_norm(x, residual.clone(), weight, EPSILON)
    found, total = rounding.add_rms_norm(x, residual, weight, EPSILON)
    assert torch.equal(total, expected_total)
    is_finite = torch.arange(ROWS, device=DEVICE) != 1
    assert torch.equal(found[is_finite], expected[is_finite])
    rounded, theirs = carried(found), scaled_product.round_rows(expected)
    assert rounded is not None
    assert rounded.scales.isfinite().tolist() == is_finite.tolist()
    assert torch.equal(rounded.codes[is_finite].view(torch.uint8), theirs.codes[is_finite].view(torch.uint8))


def test_so_does_silu():
    gate_up = random(ROWS, 2 * 112)
    check(rounding.silu_multiply(gate_up), fused.silu_multiply(gate_up))


def test_rows_of_broken_words_carry_nothing():
    x, weight = random(ROWS, 72), random(72)
    found = rounding.rms_norm(x, weight, EPSILON)
    assert carried(found) is None
    assert torch.equal(found, fused.rms_norm(x, weight, EPSILON))


def test_a_tensor_made_from_rows_does_not_carry_their_codes():
    rows = rounding.rms_norm(random(ROWS, 64), random(64), EPSILON)
    assert carried(rows) is not None
    assert carried(rows[1:]) is None
    assert carried(rows * 2) is None


def test_a_product_takes_the_codes_that_its_rows_carry(monkeypatch):
    given = []
    monkeypatch.setattr(scaled_product.ScaledProduct, "multiply", lambda _, rounded, *__: given.append(rounded))
    product = object.__new__(scaled_product.ScaledProduct)
    rows = rounding.rms_norm(random(ROWS, 64), random(64), EPSILON)
    product(rows, None)
    product(rows.clone(), None)
    assert given[0] is carried(rows)
    assert torch.equal(given[1].codes.view(torch.uint8), given[0].codes.view(torch.uint8))
