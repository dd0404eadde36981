from __future__ import annotations

import pytest

from rota.core.ids import AdapterId
from rota.policy.visits import LOOK_AHEAD, LOOK_EVERY, Settled, Shares
from tests.policy.rotation import NOW, ago, parked, resident, rotate_with, slots, turns
from tests.policy.views import A, B, C


def test_equal_weights_are_not_counted():
    shares = Shares()
    assert not shares.count([resident(A), parked(B)])
    assert not shares


def test_the_adapter_that_has_got_least_for_its_weight_has_the_largest_merit():
    shares = Shares()
    for attained in (0, 40):
        assert shares.count([resident(A, weight=1.0, attained=attained), resident(B, weight=4.0, attained=attained)])
    assert shares.merits == {A: -40.0, B: -10.0}


def test_time_without_work_earns_nothing():
    shares = Shares()
    for attained in (0, 40):
        shares.count([resident(A, attained=attained), resident(B, weight=2.0, attained=attained)])
    shares.count([resident(A, attained=40), resident(B, weight=2.0, attained=40), parked(C)])
    assert shares.merits[C] == shares.merits[B] == -20.0


def test_nothing_is_remembered_of_adapters_without_work():
    shares = Shares()
    shares.count([resident(A), resident(B, weight=2.0), parked(C)])
    shares.count([resident(A), resident(B, weight=2.0)])
    assert shares.merits.keys() == {A, B}
    shares.count([resident(A)])
    assert not shares.merits


@pytest.mark.parametrize(
    ("weight", "running", "tokens", "leaves"),
    [(1.0, 1, 16, False), (1.0, 1, 17, True), (4.0, 1, 16, False), (4.0, 1, 17, True), (1.0, 2, 32, False)],
)
def test_an_adapter_makes_room_once_it_is_sixteen_steps_of_its_sequences_ahead(weight, running, tokens, leaves):
    settled = Settled()
    for attained in (0, tokens):
        ahead = resident(A, attained=attained, weight=weight, running=running)
        for _ in range(LOOK_EVERY):
            settled.observe(slots([ahead], [parked(B, weight=2.0)]), NOW)

    assert [*settled] == [B if leaves else A]


@pytest.mark.parametrize(
    ("weight", "pause", "has_turn"), [(1.0, 15.5, True), (4.0, 119.5, False), (4.0, 120.5, True), (0.1, 120.5, True)]
)
def test_while_weights_share_the_slots_turns_come_after_120_steps_whatever_the_weight(weight, pause, has_turn):
    residents = [resident(one, claims=20.0) for one in (A, B)]
    policy = rotate_with(residents)
    seen = slots(residents, [parked(C, weight=weight, ran_at=ago(pause))])
    for _ in range(LOOK_EVERY):
        policy.observe(seen, NOW)
    assert bool(turns(policy, seen)) == has_turn


@pytest.mark.parametrize(("pause", "has_turn"), [(119.5, False), (120.5, True)])
def test_while_weights_share_the_slots_of_a_crowd_no_reader_without_text_has_its_turn_sooner(pause, has_turn):
    residents = [resident(one, claims=20.0) for one in (A, B)]
    policy = rotate_with(residents)
    dry = parked(C, weight=4.0, ran_at=ago(pause), stands_since=ago(50))
    seen = slots(residents, [dry, *(parked(AdapterId(100 + one), claims=0.1) for one in range(LOOK_AHEAD - 1))])
    for _ in range(LOOK_EVERY):
        policy.observe(seen, NOW)
    assert bool(turns(policy, seen)) == has_turn


def test_in_a_crowd_claims_decide_again():
    settled = Settled()
    crowd = [parked(AdapterId(100 + one), claims=0.1) for one in range(LOOK_AHEAD + 1)]
    settled.observe(slots([resident(A, weight=2.0)], crowd), NOW)
    assert not settled.shares
