"""A split is fair to its weights, true to its askers, and moves as few of them as it must."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.errors import RequestError
from rota.server.traffic.route import MOST_TARGETS, TrafficSplit, check_weights

few = settings(max_examples=30)
ASKERS = [f"user {number}" for number in range(400)]
RAW = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=MOST_TARGETS)


def split(*raw: float) -> TrafficSplit:
    return TrafficSplit({f"legal@{number}": weight / math.fsum(raw) for number, weight in enumerate(raw)})


def sent(split: TrafficSplit) -> dict[str, str]:
    return {asker: split.choose(asker) for asker in ASKERS}


@few
@given(RAW, st.integers(1, 500))
def test_without_askers_no_count_is_ever_far_from_its_weight(raw, requests):
    one, counts = split(*raw), Counter[str]()
    for number in range(1, requests + 1):
        counts[one.choose()] += 1
        # The target that is furthest behind is served, so none is ever a whole request ahead of its weight.
        assert all(counts[target] - number * weight < 1.0 for target, weight in one.weights.items())
    assert all(requests * weight - counts[target] < len(raw) for target, weight in one.weights.items())


def test_the_first_requests_are_spread_and_not_bunched():
    one = TrafficSplit({"legal@7": 0.75, "legal@8": 0.25})

    assert [one.choose()[-1] for _ in range(8)] == ["7", "7", "8", "7", "7", "7", "8", "7"]


@few
@given(RAW)
def test_askers_are_shared_by_weight(raw):
    one = split(*raw)
    counts = Counter(sent(one).values())

    for target, weight in one.weights.items():
        # Six standard deviations: hashes are fixed, and so no run differs from another by chance.
        allowed = 6 * math.sqrt(len(ASKERS) * weight * (1 - weight)) + 1
        assert abs(counts[target] - len(ASKERS) * weight) < allowed


@few
@given(RAW, st.randoms(use_true_random=False))
def test_an_asker_has_the_same_target_in_every_server_and_whatever_else_is_asked(raw, chance):
    first, second = split(*raw), split(*raw)
    for asker in chance.sample(ASKERS, 20):
        first.choose()
        assert first.choose(asker) == second.choose(asker)


@few
@given(RAW, st.data())
def test_an_asker_moves_only_to_a_target_that_has_grown_relative_to_its_own(raw, data):
    later = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(raw), max_size=len(raw)))
    before, after = split(*raw), split(*later)

    for asker, left in sent(before).items():
        if (taken := after.choose(asker)) != left:
            assert after.weights[taken] / before.weights[taken] > after.weights[left] / before.weights[left]


@few
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_of_two_targets_a_change_moves_no_more_than_the_change(first, second):
    before, after = (TrafficSplit({"legal@7": 1.0 - share, "legal@8": share}) for share in (first, second))
    moved = [asker for asker, target in sent(before).items() if after.choose(asker) != target]

    share = abs(second - first)
    assert abs(len(moved) - len(ASKERS) * share) < 6 * math.sqrt(len(ASKERS) * share * (1 - share)) + 1
    assert {after.choose(asker) for asker in moved} <= {"legal@8" if second > first else "legal@7"}


def test_a_target_of_weight_0_gets_nothing():
    one = TrafficSplit({"legal@7": 1.0, "legal@8": 0.0})

    assert {one.choose() for _ in range(100)} | set(sent(one).values()) == {"legal@7"}


@pytest.mark.parametrize(
    ("weights", "param", "sentence"),
    [
        ({}, "targets", "targets must name 1 to 16 targets, not 0."),
        (dict.fromkeys(map(str, range(17)), 1 / 17), "targets", "targets must name 1 to 16 targets, not 17."),
        ({"a": 0.95, "b": 0.04}, "targets", "The weights in targets must sum to 1, not 0.99."),
        ({"a": 1.0, "b": 1.0}, "targets", "The weights in targets must sum to 1, not 2."),
        ({"a": 1.5, "b": -0.5}, "targets.a", "targets.a: a weight must be between 0 and 1, not 1.5."),
        ({"a": math.nan}, "targets.a", "targets.a: a weight must be between 0 and 1, not nan."),
    ],
)
def test_weights_that_cannot_be_are_refused_with_a_sentence(weights, param, sentence):
    with pytest.raises(RequestError) as refused:
        check_weights(weights)

    assert (refused.value.fault.param, refused.value.fault.message) == (param, sentence)


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": 0.1, "b": 0.2, "c": 0.7}, dict.fromkeys("abc", 0.3333333)])
def test_weights_that_sum_within_rounding_are_taken(weights):
    check_weights(weights)
