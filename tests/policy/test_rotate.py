from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from rota.policy.slot_policies.rotate import Rotate
from rota.policy.slot_policy import Turn
from tests.policy.views import A, Absent, B, C, D, E, Slots, View, view


def rotate(quantum_s: float = 0.1, max_stall_s: float = 0.5) -> Rotate:
    return Rotate(quantum_s, max_stall_s)


def turns(
    residents: list[View], claimants: Iterable[View], policy: Rotate | None = None, now: float = 10.0
) -> list[Turn]:
    policy = policy or rotate()
    absent = Absent(sorted(claimants, key=lambda one: (policy.due_at(one), one.adapter_id)))
    return policy.turns(Slots(residents, absent), now)


def resident(adapter_id, since: float = 9.8, ran_at: float = 9.9, claims: float = 1.0, **fields):
    return view(adapter_id, slot_since=since, running=1, ran_at=ran_at, claims=claims, **fields)


def newcomer(adapter_id, since: float = 9.5, **fields):
    return view(adapter_id, waiting_since=since, **fields)


def parked(adapter_id, ran_at: float = 9.8, claims: float = 1.0, **fields):
    return view(adapter_id, running=1, ran_at=ran_at, claims=claims, **fields)


def test_an_adapter_that_waits_for_a_first_token_takes_the_slot_of_one_whose_turn_is_over():
    assert turns([resident(A)], [newcomer(B)]) == [Turn(leaver=A, successor=B)]


def test_no_resident_leaves_before_its_quantum_is_over():
    policy, fresh = rotate(quantum_s=0.1), resident(A, since=9.95)
    assert turns([fresh], [newcomer(B)], policy) == []
    assert policy.ask_again_at(Slots([fresh], Absent([newcomer(B)])), now=10.0) == 9.95 + 0.1


def test_a_weight_of_two_gives_a_quantum_twice_as_long():
    heavy = resident(A, since=9.85, weight=2.0)
    assert turns([heavy], [newcomer(B)], rotate(quantum_s=0.1)) == []
    assert turns([heavy], [newcomer(B)], rotate(quantum_s=0.1), now=10.05) == [Turn(A, B)]


def test_a_pinned_resident_stays():
    assert turns([resident(A, is_pinned=True)], [newcomer(B)]) == []


def test_no_resident_leaves_when_no_adapter_comes():
    assert turns([resident(A)], []) == []


def test_no_resident_leaves_while_no_other_adapter_can_arrive():
    slots = Slots([resident(A), resident(C, since=9.95)], Absent([newcomer(B)]), landings=0)
    assert rotate().turns(slots, now=10.0) == []
    assert rotate().ask_again_at(slots, now=10.0) == math.inf


def test_the_longest_kept_waiting_comes_first_be_it_for_a_first_token_or_for_the_next():
    claimants = [newcomer(B, since=9.7), parked(C, ran_at=9.1), newcomer(D, since=9.65)]  # C is due since 9.6

    assert [turn.successor for turn in turns([resident(A)], claimants, rotate(max_stall_s=0.5))] == [C]


def test_urgency_goes_before_any_claim():
    claimants = [parked(B, claims=100.0), newcomer(C)]
    assert turns([resident(A)], claimants) == [Turn(A, C)]


def test_of_the_adapters_that_are_not_urgent_the_larger_claim_wins_and_the_smaller_leaves():
    residents = [resident(A, claims=3.0), resident(B, claims=1.0)]
    claimants = [parked(C, claims=2.0), parked(D, claims=0.5)]

    assert turns(residents, claimants) == [Turn(leaver=B, successor=C)]


def test_a_weight_of_two_doubles_a_claim():
    assert turns([resident(A, claims=5.0)], [parked(B, claims=2.0)]) == []
    assert turns([resident(A, claims=5.0)], [parked(B, claims=2.0, weight=2.0)]) == [Turn(A, B)]


def test_a_residents_own_backlog_does_not_keep_it_in_its_slot():
    """It sits already: what its waiting requests lack is KV or a row, and staying gives them neither."""
    backlogged = resident(A, waiting_since=1.0)
    assert turns([backlogged], [parked(B, ran_at=9.0)]) == [Turn(A, B)]


def test_an_old_backlog_that_did_not_start_last_time_counts_from_then_on():
    """Else two adapters with old backlogs would hand the slot to each other and a third would never run."""
    claimants = [parked(B, ran_at=9.8, waiting_since=1.0), parked(C, ran_at=9.2)]
    assert turns([resident(A)], claimants, rotate(max_stall_s=0.5)) == [Turn(A, C)]


def test_several_leave_at_once_the_least_deserving_for_the_most_deserving():
    residents = [resident(A, claims=5.0), resident(B, claims=1.0), resident(C, claims=3.0)]
    claimants = [newcomer(D, since=9.8), newcomer(E, since=9.7)]

    assert turns(residents, claimants) == [Turn(B, E), Turn(C, D)]


def test_a_claim_wears_off_in_the_slot_and_grows_outside_of_it_so_that_equals_take_turns():
    """Five quanta of 0.1 s make a factor of two."""
    long_there, long_gone = resident(A, since=9.5), parked(B, ran_at=9.5)
    patient = rotate(max_stall_s=9.0)

    assert turns([long_there], [parked(C, ran_at=9.99, claims=0.6)], patient) == [Turn(A, C)]
    assert turns([resident(A)], [long_gone], patient) == [Turn(A, B)]
    assert turns([resident(A, claims=2.0)], [parked(B, claims=1.0)], patient) == []


def observe(policy: Rotate, absent: int, step_s: float) -> None:
    policy.observe(Slots(absent=Absent(newcomer(number) for number in range(absent)), step_s=step_s), now=10.0)


def test_a_round_longer_than_the_stall_limit_stretches_it_so_that_first_tokens_do_not_wait_behind_all_others():
    stalled, asked_later = parked(B, ran_at=9.4), newcomer(C, since=9.95)
    crowded = rotate(max_stall_s=0.5)
    assert turns([resident(A)], [stalled, asked_later], crowded) == [Turn(A, B)]
    before = crowded.due_edition

    observe(crowded, absent=24, step_s=0.05)  # two steps each: a round takes 2.4 s
    assert crowded.stall_limit_s == 2.0  # in powers of two, and no longer than the round
    assert crowded.due_edition != before, "absent adapters must be sorted anew"
    assert turns([resident(A)], [stalled, asked_later], crowded) == [Turn(A, C)]

    observe(crowded, absent=3, step_s=0.05)
    assert crowded.stall_limit_s == 0.5


def test_no_crowd_stretches_the_stall_limit_beyond_eight_times():
    crowded = rotate(max_stall_s=0.5)
    observe(crowded, absent=1000, step_s=0.05)
    assert crowded.stall_limit_s == 4.0


def test_ties_are_told_apart_by_id_in_whatever_order_they_are_seen():
    for order in itertools.permutations([newcomer(C), newcomer(D), newcomer(E)]):
        assert turns([resident(B), resident(A)], order) == [Turn(B, C), Turn(A, D)]
