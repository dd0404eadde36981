from __future__ import annotations

import math

import pytest

from rota.core.config import SchedulerConfig
from rota.policy.step_times import LEAST_TOKENS, MOST_AUTO_S, MOST_UNSEEN, StepBudget, StepTimes
from tests.builders import capacity

LONG_S = 0.05


@pytest.mark.parametrize(
    ("measured", "expected_s"),
    [
        ([], 0.02),
        ([0.5], 0.02),  # one that is far off says nothing
        ([0.5, 0.5], 0.5),  # and two are a change
        ([0.5, 0.02, 0.02, 12.0], 0.02),
    ],
)
def test_a_step_of_decodes_takes_as_long_as_recent_ones_took(measured, expected_s):
    times = StepTimes(decodes_s=0.02)
    for step_s in measured:
        times.note(0, step_s, LONG_S)

    assert times.decodes_s == expected_s


def test_what_a_token_adds_is_seen_in_long_steps():
    times = StepTimes(decodes_s=0.02)
    assert times.token_s == 0.0
    for _ in range(2):
        times.note(100, 0.12, LONG_S)

    assert times.token_s == pytest.approx(0.001)
    assert times.expected_s(200) == pytest.approx(0.22)


@pytest.mark.parametrize(("step_s", "token_s"), [(LONG_S, 0.0003), (math.nextafter(LONG_S, 0.0), 0.0)])
def test_a_step_is_long_that_takes_no_less_than_a_long_one(step_s, token_s):
    times = StepTimes(decodes_s=0.02)
    times.note(100, step_s, LONG_S)

    assert times.token_s == pytest.approx(token_s)


def test_a_short_step_may_lower_what_a_token_adds_and_never_raise_it():
    """On a GPU a step with ten tokens may take as long as one with a hundred."""
    times = StepTimes(decodes_s=0.005)
    for _ in range(9):
        times.note(10, 0.015, LONG_S)
    assert times.token_s == 0.0, "not known, rather than a hundred times too much"

    times.note(2000, 0.055, LONG_S)
    assert times.token_s == pytest.approx(0.000025)
    for _ in range(9):
        times.note(10, 0.015, LONG_S)
    assert times.token_s == pytest.approx(0.000025)
    for _ in range(2):
        times.note(2000, 0.045, LONG_S)
    assert times.token_s == pytest.approx(0.00002)


def test_the_first_use_of_a_shape_counts_until_the_next_step_and_no_longer():
    times = StepTimes(decodes_s=0.005)
    times.note(2000, 1.0, LONG_S)
    times.note(100, 0.01, LONG_S)

    assert times.token_s == pytest.approx(0.00005)


def test_decodes_that_became_quicker_are_seen_beside_prompts_too():
    times = StepTimes(decodes_s=0.4, token_s=0.003)
    assert times.note(20, 0.08, LONG_S), "a step with prompts takes longer than its decodes"

    assert times.decodes_s == 0.08


def test_a_number_of_milliseconds_is_the_limit_on_any_device():
    budget = StepBudget.of(SchedulerConfig(max_step_ms=80.0), capacity())
    assert budget is not None
    assert budget.limit_s == 0.08


@pytest.mark.parametrize(
    ("decode_s", "limit_s"), [(0.005, 0.05), (0.02, 0.08), (0.1, 0.4), (0.285, MOST_AUTO_S), (0.0, 0.05)]
)
def test_auto_is_a_few_tokens_time_within_bounds(decode_s, limit_s):
    assert StepBudget(None, StepTimes(decode_s)).limit_s == pytest.approx(limit_s)


@pytest.mark.parametrize(
    ("asked_s", "decode_s", "token_s", "decodes", "tokens"),
    [
        pytest.param(None, 0.005, 0.0, 8, math.inf, id="no speed is known"),
        pytest.param(None, 0.02, 0.003, 1, 20, id="a CPU: 60 ms for prompts"),
        pytest.param(None, 0.02, 0.003, 0, 96, id="nobody decodes: four times as long"),
        pytest.param(None, 0.006, 0.000024, 64, 1792, id="Llama-8B on an H200"),
        pytest.param(None, 0.285, 0.045, 1, LEAST_TOKENS, id="a CPU that is very busy"),
        pytest.param(0.05, 0.06, 0.000024, 256, 512, id="decodes alone exceed the limit"),
        pytest.param(0.05, 0.06, 1.0, 256, LEAST_TOKENS, id="the least"),
        pytest.param(0.2, 0.02, 0.003, 1, 56, id="a limit that was asked for"),
    ],
)
def test_a_step_takes_as_many_tokens_as_it_has_time_for(asked_s, decode_s, token_s, decodes, tokens):
    found = StepBudget(asked_s, StepTimes(decode_s, token_s)).most_work(decodes)

    assert found == pytest.approx(tokens, rel=0.05)


def test_the_budget_settles_where_steps_take_what_they_may():
    """A constant that the first guess knows nothing of, and a guess that is ten times too high."""
    budget = StepBudget(0.1, StepTimes(0.02, 0.03))
    for _ in range(12):
        tokens = budget.most_work(1)
        budget.note(1, tokens, 0.02 + 0.015 + 0.003 * tokens)

    assert 0.08 <= 0.02 + 0.015 + 0.003 * budget.most_work(1) <= 0.11


def test_a_step_that_takes_far_too_long_shortens_the_next_before_it_counts():
    budget = StepBudget(0.1, StepTimes(0.02, 0.001))
    assert budget.most_work(1) == 80
    budget.note(1, 80.0, 0.4)
    assert budget.most_work(1) == 20
    budget.note(1, 20.0, 0.04)
    assert budget.most_work(1) == 80


def test_decodes_that_take_long_do_not_talk_prompts_down_to_nothing():
    budget = StepBudget(0.05, StepTimes(0.12, 0.00002))
    for _ in range(50):
        tokens = budget.most_work(256)
        budget.note(256, tokens, 0.12 + 0.00002 * tokens)

    assert budget.most_work(256) >= 1280


def test_a_step_goes_without_prompts_when_twice_as_many_decode_as_were_ever_seen_alone():
    budget = StepBudget(None, StepTimes(0.02, 0.003))
    assert [budget.wants_a_look(decodes) for decodes in (0, 1, 2, 3)] == [False, False, False, True]
    budget.looks(3)
    assert [budget.wants_a_look(decodes) for decodes in (3, 6, 7)] == [False, False, True]

    for _ in range(MOST_UNSEEN):
        assert not budget.wants_a_look(3)
        budget.note(3, 20.0, 0.1)
    assert budget.wants_a_look(3), "it was seen too long ago"
    budget.note(3, 0.0, 0.03)
    assert not budget.wants_a_look(3)


def test_what_a_token_was_taken_to_cost_after_two_stalls_comes_down_again():
    budget = StepBudget(0.05, StepTimes(decodes_s=0.035, token_s=0.00002))
    usual = budget.most_work(8)
    for _ in range(2):
        budget.note(8, usual, 0.5)  # the machine stood still
    assert budget.most_work(8) < usual / 4
    for _ in range(40):
        work = budget.most_work(8)
        budget.note(8, work, 0.035 + 0.00002 * work)
    assert budget.most_work(8) >= usual / 2
