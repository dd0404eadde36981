from __future__ import annotations

import math

import pytest

from rota.policy.slot_policies.drain import Drain
from rota.policy.slot_policies.wait import Wait
from rota.policy.slot_policy import Turn
from tests.policy.drains import Observed, busy, starving
from tests.policy.views import A, Absent, B, C, Slots, view


def test_however_long_an_adapter_waits_a_busy_resident_keeps_its_slot():
    one = Observed(Wait())
    for now in (1.0, 1e3, 1e9):
        one.see(starving(A), busy(B), now)

    assert one.policy.draining_for == {}
    assert one.policy.ask_again_at(Slots(busy(B), Absent(starving(A))), now=9.0) == math.inf
    assert one.policy.turns(Slots(busy(B), Absent(starving(A))), now=9.0) == []
    assert one.news == []


@pytest.mark.parametrize("policy", [Wait(), Drain(max_wait_s=3.0)])
def test_a_higher_priority_than_all_a_resident_has_makes_it_drain_at_once(policy):
    one = Observed(policy)
    one.see([view(A, waiting_since=0.0, priority=1)], busy(B), now=0.0)

    assert policy.draining_for == {B: A}
    assert not policy.admits(view(B, running=1, remaining=15), steps_needed=19)


def test_no_resident_drains_for_a_priority_that_is_not_above_its_own():
    one = Observed(Wait())
    one.see([view(A, waiting_since=0.0, priority=1)], [view(B, running=1, remaining=5, priority=1)], now=999.0)

    assert one.policy.draining_for == {}


@pytest.mark.parametrize("policy", [Wait(), Drain(max_wait_s=3.0)])
def test_no_resident_drains_for_a_priority_whose_request_lacks_more_than_a_slot(policy):
    absent = Absent([view(A, waiting_since=0.0, priority=1)])
    policy.observe(Slots(busy(B), absent, unable=frozenset({A})), now=1.0)
    assert policy.draining_for == {}

    policy.observe(Slots(busy(B), absent), now=1.1)
    assert policy.draining_for == {B: A}


def test_of_several_residents_the_one_with_the_lowest_priority_drains():
    one = Observed(Wait())
    residents = [view(B, running=1, remaining=5, priority=1), view(C, running=1, remaining=90)]
    one.see([view(A, waiting_since=0.0, priority=2)], residents, now=0.0)

    assert one.policy.draining_for == {C: A}


def interrupted() -> Observed:
    """One slot: B has left it at the deadline of a drain for A, and its answers are parked."""
    one = Observed(Wait())
    urgent = [view(A, waiting_since=0.0, priority=1)]
    one.see(urgent, busy(B), now=0.0)
    assert one.see(urgent, [view(B, running=1, remaining=9, steps=18)], now=1.0) == [Turn(B, A)]
    one.see([view(B, running=1, ran_at=1.0)], [view(A, running=1, remaining=5, priority=1)], now=1.1)
    return one


def test_an_adapter_whose_answers_were_interrupted_waits_while_the_resident_is_more_urgent_and_then_comes_back():
    one = interrupted()
    assert one.policy.draining_for == {}

    one.see([view(B, running=1, ran_at=1.0)], [view(A, running=1, remaining=5, priority=0)], now=1.2)
    assert one.policy.draining_for == {A: B}


def test_an_adapter_that_is_back_in_a_slot_is_no_longer_owed_one():
    one = interrupted()
    one.see(starving(A), [view(B, running=1)], now=2.0)
    one.see([view(B, running=1, ran_at=2.0)], busy(A), now=3.0)

    assert one.policy.draining_for == {}, "another tenant's share took its slot, and no drain"
