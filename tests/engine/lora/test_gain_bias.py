"""Gains and biases scale and shift what an adapter's tokens get, by every way to apply adapters, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rota.core.adapter import Extra
from rota.engine.lora.bank import Bank
from rota.engine.lora.base import BaseMatrices
from rota.engine.lora.gain_bias import FEW_TOKENS, empty_run
from rota.engine.lora.reference import project_with_lora
from rota.engine.model.linear import Linear
from rota.engine.model.sites import SITES, site_shapes
from rota.engine.weights.load import dummy_weights
from tests.engine.lora.site_numbers import (
    BOUNDS,
    GATE_UP,
    OUTPUT,
    QKV,
    batch_of,
    random_factors,
    random_rows,
    stacked,
    token_by_token,
    with_gain_bias,
)
from tests.engine.lora.small_bank import CPU, MAX_RANK, SMALL, host_adapter
from tests.engine.nearness import relative_error
from tests.engine.triton_interpreter import DEVICE, load

triton_ops = load("rota.engine.lora.triton_ops")
TOKENS = [3, 1, 4, 1, 2, 3, 3, 4, 1, 4, 0]


def by_kernels(project: Any, x: torch.Tensor, factors: Any, batch: Any) -> torch.Tensor:
    y = project(x)
    triton_ops.add_lora(y, x, factors, batch)
    return y


WAYS = {
    "torch": (project_with_lora, DEVICE),
    "stacked": (stacked, "cpu"),
    "triton": (by_kernels, DEVICE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shape", "dtype"), [(QKV, torch.float32), (OUTPUT, torch.float32), (GATE_UP, torch.bfloat16)])
def test_tokens_of_a_slot_with_trims_are_scaled_and_shifted_and_all_others_keep_every_bit(way, shape, dtype):
    torch.manual_seed(0)
    apply, device = WAYS[way]
    plain = random_factors(shape, [8, 5, 1, 16], 16, dtype, device)
    factors = with_gain_bias(plain, [1, 2])
    y, x = random_rows(len(TOKENS), shape, dtype, device)
    batch = batch_of(TOKENS, 4, 16, device)
    expected = token_by_token(y, x, factors, TOKENS)

    found = apply(lambda _: y.clone(), x, factors, batch)
    untrimmed = apply(lambda _: y.clone(), x, plain, batch)

    assert relative_error(found, expected) < 2 * BOUNDS[dtype]
    others = [token for token, slot in enumerate(TOKENS) if slot not in (1, 2)]
    assert torch.equal(found[others], untrimmed[others])


def test_a_long_prompt_is_trimmed_as_a_token_is():
    torch.manual_seed(0)
    tokens = [0] * (FEW_TOKENS + 9) + [2, 1]
    factors = with_gain_bias(random_factors(OUTPUT, [4, 4], 16, torch.float32, "cpu"), [0])
    y, x = random_rows(len(tokens), OUTPUT, torch.float32, "cpu")
    expected = token_by_token(y, x, factors, tokens)
    found = project_with_lora(lambda _: y, x, factors, batch_of(tokens, 2, 16, "cpu"))
    assert relative_error(found, expected) < BOUNDS[torch.float32]


@pytest.fixture
def base() -> BaseMatrices:
    spec = replace(SMALL, layer_norms=(("norm", 8),), has_qkv_bias=True)
    weights = dummy_weights(spec, CPU, torch.float32)
    return BaseMatrices(weights.layers, site_shapes(spec), torch.float32, CPU)


def test_a_slot_has_its_residents_trims_and_none_once_they_have_left(base):
    bank = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, base=base, extras=Extra.GAIN_BIAS)
    shapes, plain = site_shapes(SMALL), host_adapter((1, 1, 1, 1), 1.0)
    run = torch.randn_like(empty_run(shapes, SMALL.layers))

    bank.copy_in(1, replace(plain, gain_bias=run))
    line = run[1].split([2 * shape.outputs for shape in shapes])
    for site, numbers in zip(SITES, line, strict=True):
        gain_bias = bank.factors(1, site).gain_bias
        assert torch.equal(gain_bias.numbers[1].flatten(), numbers)
        assert gain_bias.has_gain_bias.tolist() == [False, True]
    for leave in (lambda: bank.copy_in(1, plain), lambda: bank.clear(1)):
        bank.copy_in(1, replace(plain, gain_bias=run))
        leave()
        for site in SITES:
            gain_bias = bank.factors(1, site).gain_bias
            assert not gain_bias.has_gain_bias.any()
            assert (gain_bias.numbers[:, 0] == 1.0).all()
            assert (gain_bias.numbers[:, 1] == 0.0).all()


def test_the_bytes_of_trims_are_counted(base):
    plain = Bank(SMALL, 2, MAX_RANK, torch.float32, CPU).size_bytes
    gain_bias = 2 * SMALL.layers * 2 * sum(shape.outputs for shape in site_shapes(SMALL)) * 4
    assert (
        Bank(SMALL, 2, MAX_RANK, torch.float32, CPU, base=base, extras=Extra.GAIN_BIAS).size_bytes == plain + gain_bias
    )
    run = empty_run(site_shapes(SMALL), SMALL.layers)
    adapter = host_adapter((1, 1, 1, 1), 1.0)
    assert replace(adapter, gain_bias=run).size_bytes == adapter.size_bytes + gain_bias // 2


class Hidden:
    """A product whose matrix nobody can look at."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


def test_a_matrix_in_any_form_tells_its_rows_and_its_bias():
    torch.manual_seed(0)
    spec = replace(SMALL, layer_norms=(("norm", 8),), has_qkv_bias=True)
    layer = dummy_weights(spec, CPU, torch.float32).layers[0]
    plain, x = layer.qkv, torch.randn(3, 8)
    for form in (plain, Hidden(plain)):
        base = BaseMatrices([replace(layer, qkv=form)], site_shapes(spec), torch.float32, CPU)
        torch.testing.assert_close(base.at[0, "qkv"].bias(), plain.bias)
        torch.testing.assert_close(base.at[0, "qkv"].squares, plain.weight.square().sum(1))
        torch.testing.assert_close(base.at[0, "qkv"].products(x), x @ plain.weight.T)
        assert not base.at[0, "o"].bias().any()
