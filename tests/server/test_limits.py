from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rota.server.access.keys import ANYONE, Key
from rota.server.access.limits import Limits


def test_a_key_without_limits_is_never_refused():
    limits = Limits()
    limits.spend_tokens(ANYONE, 10**9, 0.0)

    assert [limits.spend_request(ANYONE, 0.0) for _ in range(1000)] == [0] * 1000


def test_a_minutes_worth_may_come_at_once_and_then_one_at_a_time():
    limits, key = Limits(), Key("acme", requests_per_minute=6)

    assert [limits.spend_request(key, 0.0) for _ in range(7)] == [0] * 6 + [10]
    assert limits.spend_request(key, 9.9) == 1
    assert limits.spend_request(key, 10.0) == 0
    assert limits.spend_request(key, 10.0) == 10


def test_tokens_are_charged_when_they_are_known_and_the_debt_is_waited_for():
    limits, key = Limits(), Key("acme", tokens_per_minute=60)

    assert limits.spend_request(key, 0.0) == 0
    limits.spend_tokens(key, 80, 0.0)
    assert limits.spend_request(key, 0.0) == 21
    assert limits.spend_request(key, 21.0) == 0


def test_one_keys_spending_is_not_anothers():
    limits = Limits()
    assert limits.spend_request(Key("acme", requests_per_minute=1), 0.0) == 0
    assert limits.spend_request(Key("acme", requests_per_minute=1), 0.0) == 60
    assert limits.spend_request(Key("other", requests_per_minute=1), 0.0) == 0


@given(
    st.integers(1, 100_000),
    st.integers(1, 1_000_000),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 300_000)), max_size=20),
)
@example(1, 1, [(7.731995831672094, 0), (1.7432239618541843, 0), (0.0, 0)])  # a sum of floats that falls short
def test_whoever_comes_back_when_told_is_let_in(requests, tokens, calls):
    limits, key, now = Limits(), Key("acme", requests_per_minute=requests, tokens_per_minute=tokens), 0.0
    for pause_s, spent in calls:
        now += pause_s
        if wait_s := limits.spend_request(key, now):
            now += wait_s
            assert limits.spend_request(key, now) == 0
        limits.spend_tokens(key, spent, now)


@pytest.mark.parametrize("limit", [1, 60, 600])
def test_after_the_first_minutes_worth_no_more_comes_through_than_that_a_minute(limit):
    limits, key = Limits(), Key("acme", requests_per_minute=limit)
    let_in = sum(limits.spend_request(key, tick * 0.05) == 0 for tick in range(12_000))  # ten minutes

    assert let_in == pytest.approx(11 * limit, abs=1)
