"""Who multiplies the quickest is taken, and all give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from rota.engine.autotune import AutotuneCache
from rota.engine.model import gemm_choice as module
from rota.engine.model.gemm_choice import GemmChoice, Way
from rota.engine.model.linear import Linear, Matrix, tune_gemms
from rota.engine.row_product import RowTuning

CPU = torch.device("cpu")
OUTPUTS, INPUTS = 6, 5


@pytest.fixture
def clock(monkeypatch) -> list[tuple[int, int, bool]]:
    """A bias is quicker for 32 and 64 rows, and hardly quicker for 48; keeps (rows, matrices, bias) of every try."""
    tries: list[tuple[int, int, bool]] = []

    def milliseconds(rows: int, weights: list[Tensor], way: Way) -> float:
        has_bias = way is not functional.linear
        tries.append((rows, len(weights), has_bias))
        return {32: 0.9, 48: 0.985, 64: 0.5}.get(rows, 1.1) if has_bias else 1.0

    monkeypatch.setattr(module, "_milliseconds", milliseconds)
    return tries


def has_bias(gemm: GemmChoice, rows: int) -> bool:
    return gemm._way_for(rows) == gemm._by_cublaslt


def matrices(gemm: GemmChoice, count: int) -> list[Linear]:
    fused = Matrix(torch.randn(OUTPUTS + 2, INPUTS), None, GemmChoice(OUTPUTS + 2, torch.float32, CPU))
    return [Linear(torch.randn(OUTPUTS, INPUTS), None, gemm, fused) for _ in range(count)]


@pytest.mark.usefixtures("clock")
def test_a_bias_of_zeros_is_added_where_that_is_quicker_by_more_than_chance():
    gemm = GemmChoice(OUTPUTS, torch.float32, CPU)
    tune_gemms(matrices(gemm, 3), [8, 32, 48, 64, 96])
    assert [rows for rows in (8, 31, 32, 48, 64, 96) if has_bias(gemm, rows)] == [32, 64]


def test_matrices_with_an_annex_are_tried_with_it_too_and_only_where_libraries_differ(clock):
    some = matrices(GemmChoice(OUTPUTS, torch.float32, CPU), 12)
    tune_gemms(some, [1, 16, 64, 256, 1024])
    assert clock == [(64, module.MOST_MATRICES, False), (64, module.MOST_MATRICES, True)] * 2
    assert some[0].widened is not None
    assert some[0].widened.gemm is not None
    assert has_bias(some[0].widened.gemm, 64)


def test_a_second_start_chooses_as_the_first_and_tries_nothing(clock):
    first, rows = AutotuneCache(), [8, 32, 48, 64, 96]
    with first.in_use():
        tune_gemms(matrices(GemmChoice(OUTPUTS, torch.float32, CPU), 3), rows)
    assert clock
    clock.clear()

    some = matrices(GemmChoice(OUTPUTS, torch.float32, CPU), 3)
    with AutotuneCache(first.made).in_use():
        tune_gemms(some, rows)
    assert clock == []
    for one in (some[0], some[0].widened):
        assert [count for count in rows if has_bias(one.gemm, count)] == [32, 64]


@pytest.mark.usefixtures("clock")
def test_the_product_is_the_same_either_way():
    gemm = GemmChoice(OUTPUTS, torch.float32, CPU)
    (matrix,) = matrices(gemm, 1)
    x = torch.randn(64, INPUTS)
    before = matrix(x)
    tune_gemms([matrix], [64])
    assert has_bias(gemm, 64)
    torch.testing.assert_close(matrix(x), before)


def test_on_a_cpu_and_beside_a_bias_there_is_nothing_to_choose(clock):
    tune_gemms([Linear(torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS))], [64])
    assert clock == []


OURS = RowTuning(columns=64, shares=1, step=128, stages=6, warps=4)


@pytest.mark.parametrize(
    ("mine", "most_rows"), [(0.9, module.OUR_ROWS), (0.99, 0), (OutOfResources(200_000, 100_000, "shared memory"), 0)]
)
def test_our_kernel_takes_few_rows_where_it_is_quicker_and_fits(monkeypatch, mine, most_rows):
    def milliseconds(_rows: int, _weights: list[Tensor], way: Way) -> float:
        if way is functional.linear:
            return 1.0
        if isinstance(mine, Exception):
            raise mine
        return mine

    monkeypatch.setattr(module, "_tuning_for", lambda _: OURS)
    monkeypatch.setattr(module, "_milliseconds", milliseconds)
    gemm = GemmChoice(OUTPUTS, torch.float32, CPU)
    tune_gemms([Linear(torch.randn(OUTPUTS, INPUTS), None, gemm)], [1, 8, 16])

    by_ours = [rows for rows in (1, 16, 17) if gemm._way_for(rows) is not functional.linear]
    assert by_ours == [rows for rows in (1, 16, 17) if rows <= most_rows]
