"""The prefill budget: what prompts that have begun leave to newcomers, and how long the oldest one yields."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import RequestId
from rota.policy.prefill_budget import MOST_WORK, most_tokens, newcomers_part, split, work_of

BUDGET = 2048


@dataclass
class Prompt:
    length: int
    rest: int
    arrival: tuple[float, RequestId] = (0.0, RequestId("a"))
    priority: int = 0
    yielded: int = 0


def prompt(rest: int, at: float = 0.0, length: int | None = None, priority: int = 0, yielded: int = 0) -> Prompt:
    arrival = (at - 10.0 * priority, RequestId(f"r{at}"))
    return Prompt(length or rest, rest, arrival, priority, yielded)


def test_a_long_prompt_leaves_the_step_to_newcomers_until_it_has_yielded_a_quarter_of_its_length():
    assert split([prompt(8000, yielded=1999)], BUDGET).first == []

    aged = prompt(8000, yielded=2000)
    assert split([aged], BUDGET).first == [(aged, 1536)]


def test_short_rests_go_before_newcomers_who_keep_a_quarter():
    long, short, middle = prompt(8000, at=1.0), prompt(300, at=2.0), prompt(1400, at=3.0)
    shared = split([long, middle, short], BUDGET)

    assert shared.first == [(short, 300)], "1,400 tokens more would leave less than 512"
    assert shared.then == [middle, long]


@pytest.mark.parametrize(
    ("length", "priority", "may_start"),
    [(4000, 0, True), (4001, 0, False), (30_000, 1, True), (30_000, 0, False)],
)
def test_a_newcomer_overtakes_prompts_that_are_twice_as_long_or_less_urgent(length, priority, may_start):
    assert split([prompt(8000), prompt(20_000, at=1.0)], BUDGET).lets_in(prompt(length, priority=priority)) is may_start


def test_a_rest_that_ends_in_this_step_does_not_keep_newcomers_out():
    shared = split([prompt(8000), prompt(100, at=1.0)], BUDGET)
    assert shared.lets_in(prompt(4000))


def test_an_urgent_prompt_goes_first_and_others_keep_their_quarter():
    urgent, other = prompt(8000, at=2.0, priority=1), prompt(9000, at=1.0)
    assert split([other, urgent], BUDGET, lowest_priority=0).first == [(urgent, 1536)]
    assert split([urgent], BUDGET, lowest_priority=1).first == [], "where all are urgent none is"


prompts = st.lists(
    st.builds(
        prompt,
        rest=st.integers(1, 40_000),
        at=st.integers(0, 10**6).map(float),
        length=st.integers(40_000, 50_000),
        priority=st.integers(0, 2),
        yielded=st.integers(0, 20_000),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda one: one.arrival,
)


@given(prompts, st.integers(1, 4096))
def test_the_newcomers_part_is_kept_and_no_prompt_is_forgotten(begun, budget):
    shared = split(begun, budget)
    assert sum(tokens for _, tokens in shared.first) <= budget - newcomers_part(budget)
    assert all(tokens <= one.rest for one, tokens in shared.first)
    known = {one.arrival for one, _ in shared.first} | {one.arrival for one in shared.then}
    assert known == {one.arrival for one in begun}


@given(st.integers(1, 60_000), st.lists(st.integers(0, 4096), max_size=200))
def test_the_oldest_prompt_yields_at_most_a_quarter_and_a_third_of_its_length(length, newcomers):
    """Newcomers ask for as many tokens in each step as they like."""
    oldest = prompt(length)
    asked = iter(newcomers)
    while oldest.rest > BUDGET:
        shared = split([oldest], BUDGET)
        planned = sum(tokens for _, tokens in shared.first)
        overtook = min(next(asked, 4096), BUDGET - planned)
        oldest.rest -= min(oldest.rest, BUDGET - overtook)
        oldest.yielded += overtook

    assert oldest.yielded <= length / 4 + length / 3 + BUDGET


@given(st.integers(1, 200_000), st.integers(1, 40_000))
def test_a_chunk_behind_a_prefix_keeps_to_the_work_of_a_step(start, deep):
    length = most_tokens(MOST_WORK * BUDGET, start, deep)
    assert work_of(length, start, deep) <= MOST_WORK * BUDGET < work_of(length + 1, start, deep) * (1 + 1e-9)
