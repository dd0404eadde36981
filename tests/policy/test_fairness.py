from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.policy.fairness import gives_up, joins_at, may_take, share, units


@dataclass
class View:
    name: str
    seats: int = 0
    weight: float = 1.0
    service_s: float = 0.0
    blocks: int = 0


def seats_of(view: View) -> int:
    return view.seats


def weights_of(*views: View) -> float:
    return sum(view.weight for view in views)


@pytest.mark.parametrize(("prompt_tokens", "decodes", "cost"), [(100, 0, 100), (0, 25, 100), (60, 10, 100), (0, 0, 0)])
def test_a_token_of_an_answer_costs_as_much_as_four_of_a_prompt(prompt_tokens, decodes, cost):
    assert units(prompt_tokens, decodes) == cost


@pytest.mark.parametrize(
    ("own_s", "others_s", "joins"),
    [(0.0, [], 0.0), (3.0, [], 3.0), (0.0, [7.0, 5.0], 5.0), (6.0, [7.0, 5.0], 6.0), (9.0, [7.0, 5.0], 9.0)],
    ids=["first", "first-again", "saves-nothing-up", "keeps-its-lead", "keeps-its-debt"],
)
def test_a_tenant_that_comes_back_counts_from_where_the_others_are(own_s, others_s, joins):
    assert joins_at(own_s, others_s) == joins


@pytest.mark.parametrize(
    ("weight", "held", "more", "may"),
    [(1.0, 3, 1, True), (1.0, 4, 1, False), (3.0, 11, 1, True), (3.0, 12, 1, False), (1.0, 1, 4, False)],
)
def test_a_tenant_takes_from_others_up_to_its_share_by_weight(weight, held, more, may):
    taker, other = View("taker", seats=held, weight=weight), View("other", weight=4.0 - weight)

    assert may_take(taker, weights_of(taker, other), total=16, held=held, more=more) is may


def test_a_tenant_that_runs_nothing_may_take_even_more_than_its_share():
    taker, other = View("taker"), View("other")

    assert may_take(taker, weights_of(taker, other), total=16, held=0, more=12)


@pytest.mark.parametrize(
    ("seats", "weights", "giver"),
    [
        ((5, 3), (1.0, 1.0), "a"),
        ((4, 4), (1.0, 1.0), None),  # both have their share of eight
        ((5, 3), (2.0, 1.0), "b"),  # three are more than a third of eight
        ((7, 1), (1.0, 1.0), "a"),
        ((6, 6), (1.0, 1.0), "b"),  # a tie: by name, so that a rerun decides the same
    ],
)
def test_the_tenant_that_holds_most_for_its_weight_makes_room(seats, weights, giver):
    views = [View(name, *both) for name, both in zip("ab", zip(seats, weights, strict=True), strict=True)]

    found = gives_up(views, None, weights_of(*views), total=8, held=seats_of)

    assert (found and found.name) == giver


def test_no_tenant_gives_up_its_last_sequence_or_makes_room_for_itself():
    large, small = View("large", seats=1, blocks=90), View("small", seats=0)
    both = weights_of(large, small)

    assert gives_up([large, small], small, both, total=100, held=lambda view: view.blocks) is None
    large.seats = 2
    assert gives_up([large, small], large, both, total=100, held=lambda view: view.blocks) is None
    assert gives_up([large, small], small, both, total=100, held=lambda view: view.blocks) is large


views = st.lists(
    st.builds(
        View,
        name=st.uuids().map(str),
        seats=st.integers(0, 9),
        weight=st.sampled_from([0.25, 1.0, 3.0]),
    ),
    min_size=2,
    max_size=6,
)


@given(views)
def test_taking_rows_in_turns_ends_and_leaves_each_tenant_its_share(tenants):
    """Rows move from tenant to tenant until no tenant may take one: nothing goes round in circles."""
    total, weights = sum(view.seats for view in tenants), weights_of(*tenants)
    moves = 0
    for taker in sorted(tenants, key=lambda view: view.name) * (total + 1):
        giver = gives_up(tenants, taker, weights, total, seats_of)
        if giver and may_take(taker, weights, total, taker.seats, 1):
            assert giver.seats > share(giver, weights, total) or not taker.seats
            giver.seats, taker.seats = giver.seats - 1, taker.seats + 1
            moves += 1
    assert moves <= total
    for view in tenants:
        if view.seats + 1 <= share(view, weights, total):
            assert gives_up(tenants, view, weights, total, seats_of) is None, "it could have more"
