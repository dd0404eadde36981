"""Every row gets its token as its request asked: chance is repeatable and fair, and filters keep what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rota.core.ids import BASE, RequestId, Row
from rota.core.plan import NO_TOKEN, Seat
from rota.core.request import SamplingParams
from rota.engine.sampling.draw import argmax, choose, cutoff, draw, mask_nan_rows, mix, sort_values, uniform
from rota.engine.sampling.sampler import Sampler
from rota.engine.step.results import Sampled
from tests.engine.triton_interpreter import DEVICE, load

VOCABULARY = 64


@pytest.fixture(autouse=True)
def same_dice() -> None:
    torch.manual_seed(0)


def seat(row: int, tokens: tuple[int, ...] = (1, 2, 3), prompt_length: int = 3, **sampling: Any) -> Seat:
    params = SamplingParams.from_fields({"seed": 0, **sampling})
    return Seat(
        request_id=RequestId(f"r{row}"),
        row=Row(row),
        adapter_id=BASE,
        tokens=tokens,
        prompt_length=prompt_length,
        blocks=(),
        sampling=params,
    )


def sampler(*seats: Seat) -> Sampler:
    made = Sampler(8, VOCABULARY, torch.device(DEVICE))
    made.seat(seats)
    return made


def sample(of: Sampler, logits: Tensor, rows: list[int], indices: list[int] | int = 3) -> Sampled:
    where = [indices] * len(rows) if isinstance(indices, int) else indices
    host_rows = np.array(rows)
    on_device = (torch.tensor(rows, dtype=torch.int32), torch.tensor(where, dtype=torch.int32))
    before = logits.clone()
    logits = logits.to(DEVICE)
    sampled = of.sample(logits, *(each.to(DEVICE) for each in on_device), host_rows)
    assert torch.equal(logits.cpu(), before), "the logits belong to somebody else"
    return sampled


def tokens(of: Sampler, logits: Tensor, rows: list[int], indices: list[int] | int = 3) -> list[int]:
    return sample(of, logits, rows, indices).tokens.tolist()


def story(of: Sampler, row: int, logits: Tensor, steps: int = 12) -> list[int]:
    """What one row draws, step after step, from the same logits."""
    return [tokens(of, logits, [row], index)[0] for index in range(3, 3 + steps)]


def test_greedy_rows_take_the_best_token():
    logits = torch.randn(3, VOCABULARY)
    of = sampler(*(seat(row, temperature=0.0) for row in range(3)))
    assert of.needs(np.array([0, 1, 2])) == 0
    assert tokens(of, logits, [2, 0, 1]) == logits.argmax(-1).tolist()


def test_rows_of_all_kinds_share_a_step():
    logits = torch.randn(4, VOCABULARY)
    of = sampler(
        seat(0, temperature=0.0),
        seat(1, top_k=1),
        seat(2, temperature=5.0, seed=1),
        seat(3, temperature=0.0, presence_penalty=2.0),
    )
    found = tokens(of, logits, [0, 1, 2, 3])
    assert found[:2] == logits[:2].argmax(-1).tolist()
    assert found[3] == int(logits[3].argmax())  # nothing written yet: nothing to be penalised
    assert found[2] == tokens(of, logits[2:3], [2])[0]


def test_a_seed_repeats_and_another_seed_does_not():
    logits = torch.randn(1, VOCABULARY)
    first = story(sampler(seat(0, seed=11)), 0, logits)
    assert story(sampler(seat(5, seed=11)), 5, logits) == first
    assert story(sampler(seat(0, seed=12)), 0, logits) != first


def test_the_sampler_draws_no_seed_of_its_own():
    with pytest.raises(AssertionError, match="is given its seed where the request is made"):
        sampler(seat(0, seed=None))
    sampler(seat(0, seed=None, temperature=0.0))


def test_neighbours_do_not_change_what_a_row_draws():
    logits = torch.randn(4, VOCABULARY)
    of = sampler(
        seat(0, seed=5, temperature=1.3), seat(1, top_p=0.3), seat(2, repetition_penalty=1.5), seat(3, temperature=0.0)
    )
    alone = [tokens(of, logits[:1], [0], index)[0] for index in range(30)]
    among = [tokens(of, logits[[3, 0, 1, 2]], [3, 0, 1, 2], [9, index, 4, 7])[1] for index in range(30)]
    assert among == alone


def test_the_temperature_sharpens_and_flattens_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0]).repeat(4000, 1)
    for temperature in (0.5, 2.0):
        of = Sampler(4000, 3, torch.device(DEVICE))
        of.seat([seat(row, temperature=temperature, seed=row) for row in range(4000)])
        found = torch.tensor(tokens(of, logits, list(range(4000))))
        shares = torch.bincount(found, minlength=3) / 4000
        assert torch.allclose(shares, torch.softmax(logits[0] / temperature, -1), atol=0.025)


def test_filtered_tokens_are_never_drawn():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0] + [-5.0] * 59])
    assert set(story(sampler(seat(0, top_k=2, temperature=9.0, seed=0)), 0, logits, 60)) == {3, 4}
    assert set(story(sampler(seat(0, top_p=0.8, seed=0)), 0, logits, 60)) == {3, 4}
    assert set(story(sampler(seat(0, min_p=0.1, seed=0)), 0, logits, 60)) == {2, 3, 4}


def test_a_top_k_beyond_the_vocabulary_filters_nothing():
    logits = torch.zeros(1, VOCABULARY)
    assert story(sampler(seat(0, top_k=10**9, seed=3)), 0, logits) == story(sampler(seat(0, seed=3)), 0, logits)


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output():
    logits = torch.randn(1, VOCABULARY) * 4.0
    known = (*logits[0].topk(6).indices.tolist(), 1, 2)
    expected = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([known]), logits.clone())
    of = sampler(seat(4, known, prompt_length=5, temperature=0.0, repetition_penalty=3.0))
    assert tokens(of, logits, [4]) == expected.argmax(-1).tolist()
    assert tokens(of, logits, [4]) != logits.argmax(-1).tolist()


def test_presence_and_frequency_count_what_was_written_and_not_the_prompt():
    logits = torch.full((1, VOCABULARY), -9.0)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.8, 2.1
    # 10 is in the prompt and costs nothing; written it costs 0.5, and 0.25 a time.
    of = sampler(seat(0, (10,), 1, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25))
    assert story(of, 0, logits, 5) == [10, 11, 10, 12, 11]


def test_a_preempted_sequence_is_penalised_as_if_nothing_had_happened():
    logits = torch.randn(1, VOCABULARY)
    asked = {"seed": 9, "repetition_penalty": 1.7, "frequency_penalty": 0.9, "presence_penalty": 0.3}
    whole = story(sampler(seat(0, **asked)), 0, logits, 12)

    again = sampler(seat(0, **asked))
    begun = story(again, 0, logits, 6)
    again.seat([seat(3, (1, 2, 3, *begun), prompt_length=3, **asked)])
    rest = [tokens(again, logits, [3], index)[0] for index in range(9, 15)]
    assert begun + rest == whole


def test_who_sits_down_inherits_nothing():
    logits = torch.randn(2, VOCABULARY)
    of = sampler(seat(0, temperature=0.0, presence_penalty=2.0), seat(1, temperature=0.0, presence_penalty=2.0))
    story(of, 0, logits[:1], 5)
    of.seat([seat(0, temperature=0.0)])
    assert tokens(of, logits, [0, 1])[0] == int(logits[0].argmax())
    of.seat([seat(0, temperature=0.0, presence_penalty=2.0)])
    assert tokens(of, logits[:1], [0])[0] == int(logits[0].argmax())


def test_logprobs_are_those_of_the_untouched_distribution():
    logits = torch.randn(3, VOCABULARY) * 2.0
    of = sampler(
        seat(0, temperature=0.0),
        seat(1, temperature=0.3, top_k=4, repetition_penalty=2.0, logprobs=5),
        seat(2, temperature=0.0, logprobs=0),
    )
    sampled = sample(of, logits, [0, 1, 2])
    expected = logits.log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.wanted == ((1, 5), (2, 0))
    chosen = expected.gather(1, sampled.tokens.cpu()[:, None])[:, 0]
    assert torch.allclose(sampled.logprobs.chosen.cpu(), chosen, atol=1e-5)
    top = expected[1].topk(5)
    assert sampled.logprobs.top_tokens[1].tolist() == top.indices.tolist()
    assert torch.allclose(sampled.logprobs.top[1].cpu(), top.values, atol=1e-5)


def test_nobody_s_logprobs_are_computed_if_nobody_asked():
    assert sample(sampler(seat(0)), torch.randn(1, VOCABULARY), [0]).logprobs is None


# Chance is repeatable and fair, the filters keep exactly what they promise, and both draws agree.

triton_draw = load("rota.engine.sampling.triton_sampling")
WIDE = 300
LARGE = triton_draw.LARGEST_TILE + WIDE  # two tiles


def parameters(temperature: float = 1.0, top_k: int = WIDE, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
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
    weights = torch.rand(50, WIDE)
    weights[:, -20:] = 0.0
    tokens = draw(weights, torch.full((50,), 1.0 - 2.0**-24), fallback=torch.zeros(50, dtype=torch.int64))
    assert int(tokens.max()) < WIDE - 20


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
    ("top_k", "top_p", "min_p"), [(WIDE, 0.8, 0.0), (20, 1.0, 0.0), (40, 0.9, 0.0), (WIDE, 0.95, 0.1)]
)
def test_the_filters_keep_what_those_of_transformers_keep(top_k: int, top_p: float, min_p: float):
    logits = torch.randn(50, WIDE) * 3.0
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        scores = warper(None, scores)
    weights = ((logits - logits.amax(-1, keepdim=True)) / 0.7).exp()
    limits = (torch.full((50,), value) for value in (float(top_k), top_p, min_p))
    assert torch.equal(weights >= cutoff(weights, *limits), scores.isfinite())


def test_a_temperature_of_nought_is_greedy_beside_rows_that_are_not():
    logits = torch.randn(2, WIDE)
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
    logits = torch.randn(4, WIDE)
    logits[1, 50], logits[2], logits[3, 7] = torch.nan, torch.nan, torch.inf
    logits = logits.to(DEVICE)
    best, rows = argmax(logits), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    seeds = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    chosen = way(logits, best, rows, rows, parameters(temperature).to(DEVICE), seeds, False)

    assert ((chosen >= 0) & (chosen < WIDE)).all(), "a next step may look it up"
    assert [token == NO_TOKEN for token in mask_nan_rows(chosen, logits).tolist()] == [False, True, True, True]
