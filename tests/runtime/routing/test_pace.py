from __future__ import annotations

import pytest

from rota.runtime.replicas.replica_state import FIRST_TOKEN_S, Pace


def test_a_token_costs_what_it_adds_to_a_step_and_not_its_share_of_the_fixed_part():
    pace = Pace()
    for tokens in (8, 64, 300, 8, 16, 500) * 20:
        pace.note(tokens, 0.005 + 0.00002 * tokens)

    assert pace.token_s == pytest.approx(0.00002)
    assert 0.005 < pace.step_s < 0.015


def test_where_all_steps_are_alike_a_token_costs_a_part_of_its_share():
    pace = Pace()
    for _ in range(100):
        pace.note(50, 0.01)

    assert 0.0 < pace.token_s < 0.01 / 50


@pytest.mark.parametrize("steps", [[], [(0, 0.01)] * 50, [(4, 0.01)] * 3], ids=["none", "without tokens", "too few"])
def test_before_anything_was_measured_a_token_costs_something(steps):
    pace = Pace()
    for tokens, seconds in steps:
        pace.note(tokens, seconds)

    assert pace.token_s == FIRST_TOKEN_S


def test_a_pace_follows_a_device_that_becomes_slower():
    pace = Pace()
    for factor in (1.0, 3.0):
        for tokens in (8, 64, 300) * 700:
            pace.note(tokens, factor * (0.005 + 0.00002 * tokens))

    assert pace.token_s == pytest.approx(0.00006, rel=0.1)
