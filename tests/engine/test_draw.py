"""Chance is repeatable and fair, the filters keep exactly what they promise, and both draws agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rota.core.plan import NO_TOKEN
from rota.engine.sampling.draw import argmax, choose, cutoff, draw, mask_nan_rows, mix, sort_values, uniform
from tests.engine.triton_interpreter import DEVICE, load

triton_draw = load("rota.engine.sampling.triton_sampling")
VOCABULARY = 300
LARGE = triton_draw.LARGEST_TILE + VOCABULARY  # two tiles


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def parameters(temperature: float = 1.0, top_k: int = VOCABULARY, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return torch.tensor([[temperature, float(top_k), top_p, min_p]])


def kept(weights: list[float], top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The tokens that stay."""
    row = torch.tensor([weights])
    row = row / row.max()
    limits = torch.tensor([float(top_k or len(weights))]), torch.tensor([top_p]), torch.tensor([min_p])
    return torch.nonzero(row[0] >= cutoff(row, *limits)[0]).flatten().tolist()


def tokens_of(
    chooser: Callable[..., Tensor], logits: Tensor, settings: Tensor, index: int, has_filters: bool = False
) -> Tensor:
    """What each row draws; rows lie the other way round than their logits."""
    count, device = len(logits), logits.device
    rows = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)
    indices = torch.full((count,), index, dtype=torch.int32, device=device)
    seeds = mix(torch.arange(count, device=device))
    best = logits.argmax(-1)
    return chooser(logits, best, rows, indices, settings.flip(0), seeds, has_filters)


def splitmix(state: int) -> int:
    """SplitMix64's output function in whole numbers without end."""
    every_bit = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & every_bit
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & every_bit
    return state ^ (state >> 31)


def test_the_mix_is_splitmix64_also_for_numbers_that_overflow():
    for number in (0, 1, 2**62 + 12345, 2**63 - 1):
        assert int(mix(torch.tensor([number]))[0]) % 2**64 == splitmix(number)


def test_the_uniform_number_is_the_mix_of_seed_and_index_whatever_the_index_s_width():
    for dtype in (torch.int32, torch.int64):
        (found,) = uniform(torch.tensor([77]), torch.tensor([5], dtype=dtype)).tolist()
        assert found == (splitmix(77 + 5 * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 40) / 2**24


def test_uniform_numbers_are_even_and_differ_by_seed_and_by_index():
    seeds, indices = torch.arange(100).repeat_interleave(200), torch.arange(200).repeat(100)
    numbers = uniform(mix(seeds), indices)
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    assert len(numbers.unique()) > 19_980
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


def test_tokens_are_drawn_in_proportion_to_their_weights():
    weights = torch.tensor([0.05, 0.3, 0.0, 0.4, 0.05, 0.2]).repeat(20_000, 1)
    numbers = uniform(mix(torch.full((20_000,), 7)), torch.arange(20_000))
    tokens = draw(weights, numbers, fallback=torch.zeros(20_000, dtype=torch.int64))
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[2] == 0
    expected = weights[0].double() * 20_000
    chi_square = ((counts - expected) ** 2 / expected)[[0, 1, 3, 4, 5]].sum()
    assert float(chi_square) < 18.5  # 4 degrees of freedom, 0.1 %


def test_the_largest_uniform_number_still_draws_a_token_that_has_weight():
    weights = torch.rand(50, VOCABULARY)
    weights[:, -20:] = 0.0
    tokens = draw(weights, torch.full((50,), 1.0 - 2.0**-24), fallback=torch.zeros(50, dtype=torch.int64))
    assert int(tokens.max()) < VOCABULARY - 20


def test_top_k_keeps_k_tokens_and_those_that_tie_with_the_last():
    assert kept([0.1, 0.4, 0.3, 0.2], top_k=2) == [1, 2]
    assert kept([0.1, 0.4, 0.25, 0.25], top_k=2) == [1, 2, 3]
    assert kept([0.1, 0.4, 0.3, 0.2], top_k=1) == [1]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass():
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=0.39) == [1]
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=0.41) == [1, 2]
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=0.95) == [0, 1, 2, 3]
    assert kept([0.1, 0.4, 0.3, 0.2], top_p=1e-9) == [1]


def test_top_p_counts_only_what_top_k_left():
    # Of 0.5 and 0.3, the first is 0.625 of what is left.
    assert kept([0.5, 0.3, 0.1, 0.1], top_k=2, top_p=0.6) == [0]
    assert kept([0.5, 0.3, 0.1, 0.1], top_k=2, top_p=0.7) == [0, 1]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    assert kept([0.5, 0.3, 0.14, 0.06], min_p=0.25) == [0, 1, 2]
    assert kept([0.5, 0.3, 0.14, 0.06], min_p=1.0) == [0]


def test_without_filters_everything_stays_however_unlikely():
    assert kept([1.0, 1e-12, 1e-30, 0.5]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(VOCABULARY, 0.8, 0.0), (20, 1.0, 0.0), (40, 0.9, 0.0), (VOCABULARY, 0.95, 0.1)]
)
def test_the_filters_keep_what_those_of_transformers_keep(top_k: int, top_p: float, min_p: float):
    logits = torch.randn(50, VOCABULARY) * 3.0
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = warper(None, scores)
    weights = ((logits - logits.amax(-1, keepdim=True)) / 0.7).exp()
    limits = (torch.full((50,), value) for value in (float(top_k), top_p, min_p))
    assert torch.equal(weights >= cutoff(weights, *limits), scores.isfinite())


def test_a_temperature_of_nought_is_greedy_beside_rows_that_are_not():
    logits = torch.randn(2, VOCABULARY)
    best = argmax(logits)
    settings = torch.cat([parameters(temperature=0.0), parameters(temperature=100.0)])
    found = [tokens_of(choose, logits, settings, index).tolist() for index in range(50)]
    assert {tokens[0] for tokens in found} == {int(best[0])}
    assert len({tokens[1] for tokens in found}) > 30


@pytest.mark.parametrize("has_filters", [False, True])
def test_the_triton_draw_chooses_what_the_torch_draw_chooses(has_filters: bool):
    settings = torch.cat(
        [
            parameters(top_k=LARGE),
            parameters(top_k=LARGE, temperature=0.0),
            parameters(top_k=LARGE, temperature=2.0, top_p=0.6),
            parameters(top_k=17),
            parameters(top_k=1000, temperature=3.0, top_p=0.99, min_p=0.01),
            parameters(top_k=LARGE, temperature=1.5, min_p=0.05),
        ]
    ).repeat(50 if DEVICE == "cuda" else 1, 1)
    logits = torch.randn(len(settings), LARGE) * 2.0
    found = tokens_of(triton_draw.choose, logits.to(DEVICE), settings.to(DEVICE), 3, has_filters)
    is_same = found.cpu() == tokens_of(choose, logits, settings, 3, has_filters)
    # Sums of 8492 weights round differently: about one number in a thousand lies between two tokens' borders.
    assert is_same.float().mean() > 0.98


def test_argmax_and_sort_do_as_torch_does():
    values = torch.randn(3, 50).round(decimals=1)
    assert torch.equal(argmax(values), values.argmax(-1))
    assert torch.equal(sort_values(values), values.sort(-1).values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", [choose, triton_draw.choose], ids=["torch", "triton"])
def test_where_logits_are_not_numbers_there_is_no_token(way, temperature):
    logits = torch.randn(4, VOCABULARY)
    logits[1, 50], logits[2], logits[3, 7] = torch.nan, torch.nan, torch.inf
    logits = logits.to(DEVICE)
    best, rows = argmax(logits), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    seeds = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    chosen = way(logits, best, rows, rows, parameters(temperature).to(DEVICE), seeds, False)

    assert ((chosen >= 0) & (chosen < VOCABULARY)).all(), "a next step may look it up"
    assert [token == NO_TOKEN for token in mask_nan_rows(chosen, logits).tolist()] == [False, True, True, True]
