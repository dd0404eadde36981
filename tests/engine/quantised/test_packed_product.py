"""A packed product is the same whichever way computes it, and takes the way that was the fastest."""

from __future__ import annotations

import pytest
import torch

from rota.engine.autotune import AutotuneCache
from rota.engine.model.linear import Linear, tune_gemms
from rota.engine.quantised.packing import pack_eight_bits, pack_four_bits, step_of
from rota.engine.quantised.products import in_eight_bit_floats, in_order
from rota.engine.weights.makers import SideBySide
from tests.engine.nearness import relative_error
from tests.engine.quantised.few_bits import on_device, random_codes
from tests.engine.triton_interpreter import DEVICE, load

module = load("rota.engine.quantised.packed_product")
BOUND = 6e-3


def made(outputs: int, inputs: int):
    torch.manual_seed(0)
    codes = on_device(random_codes(outputs, inputs), DEVICE)
    packed = pack_four_bits(codes, step_of(codes))
    return module.PackedProduct(packed, module.WrittenOutProduct(packed)), codes.weights()


@pytest.mark.parametrize("rows", [1, 16, 65, 130, 257])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_number_of_rows(monkeypatch, rows, has_bias):
    monkeypatch.setattr(module, "MOST_WRITTEN", 64 * 256)  # the matrix is written out in two portions
    product, weights = made(100, 256)
    x = torch.randn(rows, 256).to(DEVICE, torch.bfloat16)
    bias = torch.randn(100).to(DEVICE, torch.bfloat16) if has_bias else None
    expected = x.float() @ weights.T + (0.0 if bias is None else bias.float())
    assert relative_error(product(x, bias), expected) < BOUND


def test_float32_is_multiplied_by_what_is_written_out():
    product, weights = made(64, 128)
    x = torch.randn(2, 128).to(DEVICE)
    assert relative_error(product(x, None), x @ weights.T) < 1e-4


def test_inputs_in_the_order_of_importance_are_sorted():
    codes = on_device(random_codes(70, 256, 64, is_shuffled=True), DEVICE)
    order = codes.groups.argsort(stable=True)
    packed = pack_four_bits(in_order(codes, order), step_of(codes))
    x = torch.randn(3, 256).to(DEVICE, torch.bfloat16)
    found = module.PackedProduct(packed, module.WrittenOutProduct(packed))(x[:, order], None)
    assert relative_error(found, x.float() @ codes.weights().T) < BOUND


@pytest.mark.parametrize(
    ("group", "has_whole_zeros", "step"), [(32, True, 32), (96, True, 32), (256, True, 128), (None, True, 128),
                                           (48, True, None), (64, False, None)],
)  # fmt: skip
def test_the_kernel_takes_what_it_can(group, has_whole_zeros, step):
    assert step_of(random_codes(8, 768, group, has_whole_zeros=has_whole_zeros)) == step


def test_groups_of_different_lengths_are_not_for_the_kernel():
    codes = random_codes(8, 256, 64, is_shuffled=True)
    codes.groups[:2] = 0
    assert step_of(codes) is None


def test_the_fastest_way_is_taken_for_all_matrices_alike(monkeypatch):
    products = [made(128, 512)[0] for _ in range(10)]
    tunings = products[0].tunings(4)
    tries: list[tuple[int, int]] = []

    def milliseconds(calls) -> float:
        x, _, way = calls[0].args
        tries.append((len(x), len(calls)))
        if way == tunings[0]:
            raise module.OutOfResources(200_000, 100_000, "shared memory")
        return 1.0 if way == (tunings[-1] if len(x) == 4 else None) else 2.0

    monkeypatch.setattr(module, "graph_milliseconds", milliseconds)
    products[0].tune(products, [1, 3, 20, 512])

    assert set(tries) == {(4, module.MOST_MATRICES), (64, module.MOST_MATRICES)}
    for one in products:
        assert (one._chosen[4], one._chosen[64]) == (tunings[-1], None)
        assert one._chosen[16] == products[0].tunings(16)[0], "what was not asked for was not tried"


def test_a_second_start_takes_the_same_ways_and_tries_none(monkeypatch):
    first, ways = AutotuneCache(), {}

    def milliseconds(calls) -> float:
        x, _, way = calls[0].args
        ways.setdefault(len(x), []).append(way)
        return 1.0 if way == (ways[4][-1] if len(x) == 4 else None) else 2.0

    monkeypatch.setattr(module, "graph_milliseconds", milliseconds)
    product, again, other = made(128, 512)[0], made(128, 512)[0], made(128, 256)[0]
    with first.in_use():
        product.tune([product], [4, 64])
    ways.clear()

    with AutotuneCache(first.made).in_use():
        again.tune([again], [4, 64])
        assert (ways, again._chosen) == ({}, product._chosen)
        other.tune([other], [4])
    assert ways, "a matrix of another shape was not tried before"


def test_shares_fill_the_processors_and_leave_each_program_something_to_do(monkeypatch):
    monkeypatch.setattr(module, "processors_of", lambda _: 132)
    matrix = in_eight_bit_floats(torch.zeros(4096, 4096, dtype=torch.bfloat16))
    large = module.tunings_for(pack_eight_bits(matrix), 16)
    in_16_bits = {(64, 8), (128, 8), (128, 16), (64, 16)}
    rounded = {(64, 2), (128, 4)}  # a program for each processor
    assert {(one.columns, one.shares) for one in large} == in_16_bits | rounded
    small = module.tunings_for(pack_eight_bits(in_eight_bit_floats(torch.zeros(64, 64))), 16)
    assert {one.shares for one in small} == {1}


def test_a_projection_is_tuned_like_any_other(monkeypatch):
    linear = load("rota.engine.quantised.linear")
    tried = []
    monkeypatch.setattr(module.PackedProduct, "tune", lambda _, products, rows: tried.append((products, rows)))
    projections = [linear.FewBitsLinear(made(64, 128)[0], None) for _ in range(2)]
    tune_gemms(projections, [1, 64])
    assert tried == [([one._product for one in projections], [1, 64])]


def test_parts_side_by_side_are_tuned_part_by_part(monkeypatch):
    linear = load("rota.engine.quantised.linear")
    tried = []
    monkeypatch.setattr(module.PackedProduct, "tune", lambda _, products, rows: tried.append((products, rows)))
    layers = [[linear.FewBitsLinear(made(64, 128)[0], None) for _ in range(3)] for _ in range(2)]
    tune_gemms([SideBySide(parts) for parts in layers], [1])
    assert tried == [([one[nth]._product for one in layers], [1]) for nth in range(3)]


def test_a_layer_whose_matrix_is_kept_whole_leaves_the_others_to_be_tuned(monkeypatch):
    linear = load("rota.engine.quantised.linear")
    tried = []
    monkeypatch.setattr(module.PackedProduct, "tune", lambda _, products, rows: tried.append((products, rows)))
    whole, packed = Linear(torch.ones(64, 128)), made(64, 128)[0]
    tune_gemms([whole, linear.FewBitsLinear(packed, None)], [1])
    assert tried == [([packed], [1])]
