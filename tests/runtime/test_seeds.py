from __future__ import annotations

from rota.core.request import MAX_SEED, SamplingParams
from rota.runtime.seeds import seeded


def test_a_seed_that_was_given_is_kept_and_further_choices_follow_from_it():
    asked = SamplingParams(seed=7)

    assert seeded(asked) == asked
    assert [seeded(asked, choice).seed for choice in range(3)] == [7, 8, 9]
    assert seeded(SamplingParams(seed=MAX_SEED), 1).seed == 0


def test_without_a_seed_each_choice_of_each_request_is_given_one_of_its_own():
    drawn = [seeded(SamplingParams(top_p=0.5), choice) for choice in (0, 1, 0, 1)]

    assert len({params.seed for params in drawn}) == 4
    assert {params.top_p for params in drawn} == {0.5}


def test_a_greedy_request_needs_no_seed():
    assert seeded(SamplingParams(temperature=0.0)).seed is None
