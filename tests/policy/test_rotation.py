from __future__ import annotations

import itertools

from rota.policy.rotation import LoRARotation, Turn
from tests.policy.views import A, B, C, D, E, view


def rotation(quantum_s: float = 0.1, max_stall_s: float = 0.5) -> LoRARotation:
    return LoRARotation(quantum_s, max_stall_s)


def tenant(adapter_id, since: float = 9.8, ran_at: float = 9.9, claims: float = 1.0, **fields):
    return view(adapter_id, slot_since=since, running=1, ran_at=ran_at, claims=claims, **fields)


def newcomer(adapter_id, since: float = 9.5, **fields):
    return view(adapter_id, waiting_since=since, **fields)


def parked(adapter_id, ran_at: float = 9.8, claims: float = 1.0, **fields):
    return view(adapter_id, running=1, ran_at=ran_at, claims=claims, **fields)


def test_who_waits_for_a_first_token_takes_the_slot_of_one_whose_turn_is_over():
    assert rotation().turns([tenant(A)], [newcomer(B)], now=10.0) == [Turn(leaver=A, comer=B)]


def test_nobody_leaves_before_its_quantum_is_over():
    assert rotation(quantum_s=0.1).turns([tenant(A, since=9.95)], [newcomer(B)], now=10.0) == []
    assert rotation(quantum_s=0.1).turn_over_at(tenant(A, since=9.95)) == 9.95 + 0.1


def test_a_weight_of_two_gives_a_quantum_twice_as_long():
    heavy = tenant(A, since=9.85, weight=2.0)
    assert rotation(quantum_s=0.1).turns([heavy], [newcomer(B)], now=10.0) == []
    assert rotation(quantum_s=0.1).turns([heavy], [newcomer(B)], now=10.05) == [Turn(A, B)]


def test_a_pinned_tenant_stays():
    assert rotation().turns([tenant(A, is_pinned=True)], [newcomer(B)], now=10.0) == []


def test_nobody_leaves_when_nobody_comes():
    assert rotation().turns([tenant(A)], [], now=10.0) == []


def test_the_longest_kept_waiting_comes_first_be_it_for_a_first_token_or_for_the_next():
    claimants = [newcomer(B, since=9.7), parked(C, ran_at=9.1), newcomer(D, since=9.65)]  # C is due since 9.6
    turns = rotation(max_stall_s=0.5).turns([tenant(A)], claimants, now=10.0)

    assert [turn.comer for turn in turns] == [C]


def test_urgency_goes_before_any_claim():
    claimants = [parked(B, claims=100.0), newcomer(C)]
    assert rotation().turns([tenant(A)], claimants, now=10.0) == [Turn(A, C)]


def test_of_those_who_are_not_urgent_the_larger_claim_wins_and_the_smaller_leaves():
    tenants = [tenant(A, claims=3.0), tenant(B, claims=1.0)]
    claimants = [parked(C, claims=2.0), parked(D, claims=0.5)]

    assert rotation().turns(tenants, claimants, now=10.0) == [Turn(leaver=B, comer=C)]


def test_a_weight_of_two_doubles_a_claim():
    assert rotation().turns([tenant(A, claims=5.0)], [parked(B, claims=2.0)], now=10.0) == []
    assert rotation().turns([tenant(A, claims=5.0)], [parked(B, claims=2.0, weight=2.0)], now=10.0) == [Turn(A, B)]


def test_a_tenants_own_backlog_does_not_keep_it_in_its_slot():
    """It sits already: what its waiting requests lack is KV or a row, and staying gives them neither."""
    backlogged = tenant(A, waiting_since=1.0)
    assert rotation().turns([backlogged], [parked(B, ran_at=9.0)], now=10.0) == [Turn(A, B)]


def test_an_old_backlog_that_did_not_start_last_time_counts_from_then_on():
    """Else two adapters with old backlogs would hand the slot to each other and a third would never run."""
    claimants = [parked(B, ran_at=9.8, waiting_since=1.0), parked(C, ran_at=9.2)]
    assert rotation(max_stall_s=0.5).turns([tenant(A)], claimants, now=10.0) == [Turn(A, C)]


def test_several_leave_at_once_the_least_deserving_for_the_most_deserving():
    tenants = [tenant(A, claims=5.0), tenant(B, claims=1.0), tenant(C, claims=3.0)]
    claimants = [newcomer(D, since=9.8), newcomer(E, since=9.7)]

    assert rotation().turns(tenants, claimants, now=10.0) == [Turn(B, E), Turn(C, D)]


def test_a_claim_wears_off_in_the_slot_and_grows_outside_of_it_so_that_equals_take_turns():
    """Five quanta of 0.1 s make a factor of two."""
    long_there, long_gone = tenant(A, since=9.5), parked(B, ran_at=9.5)
    patient = rotation(max_stall_s=9.0)

    assert patient.turns([long_there], [parked(C, ran_at=9.99, claims=0.6)], now=10.0) == [Turn(A, C)]
    assert patient.turns([tenant(A)], [long_gone], now=10.0) == [Turn(A, B)]
    assert patient.turns([tenant(A, claims=2.0)], [parked(B, claims=1.0)], now=10.0) == []


def test_a_round_longer_than_the_stall_limit_stretches_it_so_that_first_tokens_do_not_wait_behind_everybody():
    stalled, asked_later = parked(B, ran_at=9.4), newcomer(C, since=9.95)
    crowded = rotation(max_stall_s=0.5)
    assert crowded.turns([tenant(A)], [stalled, asked_later], now=10.0) == [Turn(A, B)]

    crowded.observe(claimants=24, step_s=0.05)  # two steps each: a round takes 2.4 s
    assert crowded.stall_limit_s == 2.0  # in powers of two, and no longer than the round
    assert crowded.turns([tenant(A)], [stalled, asked_later], now=10.0) == [Turn(A, C)]

    crowded.observe(claimants=3, step_s=0.05)
    assert crowded.stall_limit_s == 0.5


def test_no_crowd_stretches_the_stall_limit_beyond_eight_times():
    crowded = rotation(max_stall_s=0.5)
    crowded.observe(claimants=1000, step_s=0.05)
    assert crowded.stall_limit_s == 4.0


def test_ties_are_told_apart_by_id_in_whatever_order_they_are_seen():
    for order in itertools.permutations([newcomer(C), newcomer(D), newcomer(E)]):
        assert rotation().turns([tenant(B), tenant(A)], order, now=10.0) == [Turn(B, C), Turn(A, D)]
