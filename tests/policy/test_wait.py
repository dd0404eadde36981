from __future__ import annotations

import math

import pytest

from rota.policy.slot_policies.drain import Drain
from rota.policy.slot_policies.wait import Wait
from tests.policy.drains import Observed, busy, starving
from tests.policy.views import A, Absent, B, C, Slots, view


def test_however_long_an_adapter_waits_a_busy_resident_keeps_its_slot():
    one = Observed(Wait(slots=1))
    for now in (1.0, 1e3, 1e9):
        one.see(starving(A), busy(B), now)

    assert one.policy.draining_for == {}
    assert one.policy.ask_again_at(Slots(busy(B), Absent(starving(A))), now=9.0) == math.inf
    assert one.policy.turns(Slots(busy(B), Absent(starving(A))), now=9.0) == ()
    assert one.news == []


@pytest.mark.parametrize("policy", [Wait(slots=1), Drain(max_wait_s=3.0, slots=1)])
def test_a_higher_priority_than_all_a_resident_has_makes_it_drain_at_once(policy):
    one = Observed(policy)
    one.see([view(A, waiting_since=0.0, priority=1)], busy(B), now=0.0)

    assert policy.draining_for == {B: A}
    assert not policy.admits(view(B, running=1, remaining=15), steps_needed=19)


def test_no_resident_drains_for_a_priority_that_is_not_above_its_own():
    one = Observed(Wait(slots=1))
    one.see([view(A, waiting_since=0.0, priority=1)], [view(B, running=1, remaining=5, priority=1)], now=999.0)

    assert one.policy.draining_for == {}


def test_of_several_residents_the_one_with_the_lowest_priority_drains():
    one = Observed(Wait(slots=2))
    residents = [view(B, running=1, remaining=5, priority=1), view(C, running=1, remaining=90)]
    one.see([view(A, waiting_since=0.0, priority=2)], residents, now=0.0)

    assert one.policy.draining_for == {C: A}
