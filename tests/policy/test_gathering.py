from __future__ import annotations

import pytest

from rota.core.ids import AdapterId
from rota.policy.gathering import MOST_STEPS, STEPS_FOR_EACH
from rota.policy.slot_policies.rotate import Rotate
from tests.policy.rotation import NOW, ago, newcomer, parked, resident, rotate_with, slots, turns
from tests.policy.views import A, B, C, D, F, Slots


def crowded(parked_ones: int, waited: float = 1.0, **fields) -> Slots:
    """Adapter A runs an answer, and a request has waited for so many steps to start beside it."""
    absent = [parked(AdapterId(100 + one), ran_at=NOW) for one in range(parked_ones)]
    return slots([resident(A, waiting_since=ago(waited), **fields)], absent)


def holding(seen: Slots) -> Rotate:
    policy = rotate_with([resident(A)])
    policy.observe(seen, NOW)
    return policy


@pytest.mark.parametrize(
    ("parked_ones", "waited", "starts"),
    [
        (1, 0.1, True),  # as many are parked as there are slots
        (2, STEPS_FOR_EACH - 0.1, False),
        (2, STEPS_FOR_EACH + 0.1, True),
        (3, 2 * STEPS_FOR_EACH - 0.1, False),
        (60, MOST_STEPS - 0.1, False),
        (60, MOST_STEPS + 0.1, True),
    ],
)
def test_prompts_wait_for_others_only_while_more_adapters_are_parked_than_slots_and_for_a_bounded_time(
    parked_ones, waited, starts
):
    seen = crowded(parked_ones, waited)
    assert holding(seen).admits(seen.residents[0], steps_needed=9) is starts


def test_a_slot_in_which_nothing_runs_never_waits():
    seen = crowded(9, running=0)
    assert holding(seen).admits(seen.residents[0], steps_needed=9)


def test_prompts_start_in_the_step_in_which_a_visitor_starts():
    policy, seen = rotate_with([resident(A)]), crowded(9)
    resident_a = seen.residents[0]
    policy.observe(seen, NOW)
    assert not policy.admits(resident_a, 9)
    policy.observe(slots([resident_a], [*seen.absent, newcomer(B)]), NOW)
    assert not policy.admits(resident_a, 9), "the visitor's copy is under way"
    policy.observe(seen, NOW)
    assert policy.admits(resident_a, 9)
    policy.observe(seen, NOW)
    assert not policy.admits(resident_a, 9), "and then the next are gathered"


def test_newcomers_come_along_with_a_visitor_of_the_last_pass_however_short_their_wait():
    policy = rotate_with([resident(A)])
    long_pause = parked(D, ran_at=ago(2032))  # first tokens wait for two hundred steps
    crowd = [parked(AdapterId(100 + one)) for one in range(9)]  # so many that no parked adapter has a turn
    absent = [long_pause, *crowd, newcomer(B, since=ago(1))]
    assert turns(policy, slots([resident(A)], absent)) == []
    assert len(turns(policy, slots([resident(A)], [*absent, newcomer(C, since=ago(201))]))) == 1

    visited = slots([resident(C, is_prefilling=True), resident(F)], [parked(A, ran_at=NOW), *absent])
    assert [turn.successor for turn in turns(policy, visited)] == [B]
