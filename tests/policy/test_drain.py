from __future__ import annotations

import itertools
import math

import pytest

from rota.policy.drains import LONGEST_READ_S, RESERVATION_S
from rota.policy.slot_policies.drain import Drain
from rota.policy.slot_policy import Turn
from tests.policy.drains import Observed, busy, starving
from tests.policy.views import A, Absent, B, C, D, E, F, Slots, view


def drain(max_wait_s: float = 3.0) -> Observed:
    return Observed(Drain(max_wait_s))


def draining(victim=B, beneficiary=A, remaining: int = 15, now: float = 3.1) -> Observed:
    """One slot, in which `victim` drains since `now`."""
    one = drain()
    one.see(starving(beneficiary), busy(victim, remaining=remaining), now)
    assert one.policy.draining_for == {victim: beneficiary}
    return one


# ── who drains for whom ──────────────────────────────────────────────────────────────────────────────────────────────


def test_starving_adapters_longest_wait_first_get_the_residents_with_the_least_left():
    one = drain()
    absent = [view(D, waiting_since=0.04), view(A, waiting_since=0.0)]
    residents = [view(C, running=1, remaining=100), view(B, running=1, remaining=5)]
    one.see(absent, residents, now=3.05)

    assert one.policy.draining_for == {B: A, C: D}
    assert one.told("started") == 2


@pytest.mark.parametrize(("now", "victims"), [(3.0, set()), (math.nextafter(3.0, 4.0), {B})])
def test_a_wait_must_be_strictly_over_the_threshold(now, victims):
    one = drain()
    one.see(starving(A), busy(B), now)

    assert one.policy.draining_for.keys() == victims


def test_it_asks_again_when_the_next_adapter_starves():
    one = drain()
    one.see([*starving(A), *starving(C, since=0.5)], busy(B), now=3.1)

    assert one.policy.ask_again_at(Slots(busy(B), Absent(starving(A))), now=3.1) == math.nextafter(3.5, 4.0)


def test_no_resident_drains_while_a_slot_can_be_had():
    one = drain()
    one.see(starving(A), busy(B), now=9.0, free=1)

    assert one.policy.draining_for == {}


def test_one_drain_is_enough_for_one_adapter_that_starves():
    one = drain()
    for now in (4.0, 5.0, 6.0):
        one.see(starving(A), busy(B, C, D), now)

    assert one.policy.draining_for == {B: A}
    assert one.told("started") == 1


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3)])
def test_at_most_half_of_the_slots_drain_at_once_and_of_two_both_may(slots, most):
    one = drain()
    adapters = range(1, 2 * slots + 1)
    one.see(starving(*adapters[slots:]), busy(*adapters[:slots]), now=9.0)

    assert len(one.policy.draining_for) == most


def test_an_adapter_that_drains_is_no_beneficiary_so_that_drains_do_not_cascade():
    one = draining(victim=B, beneficiary=A)
    # Its own requests now starve as well, since it may not admit them.
    absent = [view(A, waiting_since=0.0), view(B, waiting_since=0.1, running=1, remaining=15)]
    one.see(absent, busy(B, C), now=9.0)

    assert one.policy.draining_for == {B: A}


def test_no_adapter_drains_for_itself():
    one = drain()
    both = [view(A, waiting_since=0.0, running=1, remaining=3), view(B, running=1, remaining=50)]
    one.see(starving(C), both, now=9.0)

    assert one.policy.draining_for == {A: C}


def test_of_the_residents_that_may_drain_the_lowest_priority_does_before_the_least_work():
    one = drain()
    residents = [view(B, running=1, remaining=5, priority=1), view(C, running=1, remaining=90)]
    one.see(starving(A), residents, now=9.0)

    assert one.policy.draining_for == {C: A}


def test_a_pinned_adapter_is_never_the_victim_however_little_it_has_left():
    one = drain()
    pinned = view(B, running=1, remaining=1, is_pinned=True)
    one.see(starving(A), [pinned, view(C, running=1, remaining=400)], now=9.0)

    assert one.policy.draining_for == {C: A}


def test_with_nothing_but_pinned_residents_none_drains():
    one = drain()
    one.see(starving(A), [view(B, running=1, is_pinned=True)], now=9.0)

    assert one.policy.draining_for == {}


def test_equal_waits_and_equal_work_are_told_apart_by_id_in_whatever_order_they_are_seen():
    for order in itertools.permutations((C, D, E)):
        one = drain()
        one.see(starving(B, A), busy(*order, remaining=7), now=9.0)
        assert one.policy.draining_for == {C: A, D: B}


# ── what a draining adapter may take on ──────────────────────────────────────────────────────────────────────────────


def test_a_draining_adapter_takes_on_what_ends_before_its_drain_does():
    policy = draining(remaining=15).policy
    victim = view(B, running=1, remaining=15)

    assert policy.admits(victim, steps_needed=10)
    assert policy.admits(victim, steps_needed=18)
    assert not policy.admits(victim, steps_needed=19)
    assert not policy.admits(victim, steps_needed=20)


def test_others_take_on_what_they_like():
    assert draining(victim=B).policy.admits(view(C, running=1, remaining=5), steps_needed=4096)


def test_the_budget_of_a_drain_only_shrinks():
    one = draining(remaining=10)  # twelve steps to go

    longest = []
    for step in range(14):
        # A newcomer that just fits does not move the deadline, whatever is left to do for it.
        victim = view(B, running=1, remaining=12 - step, steps=step)
        one.see(starving(A), [victim], now=3.2)
        longest.append(max(needed for needed in range(20) if needed == 0 or one.policy.admits(victim, needed)))
    assert longest == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_a_stream_of_long_requests_does_not_keep_a_drain_open():
    """Where a drain's bar is 1.2 × what is left now, this one is still open after 20,000 steps."""
    one = draining(remaining=512)
    ends_at, step = 512, 0
    while one.policy.draining_for:
        victim = view(B, running=int(step < ends_at), remaining=ends_at - step, steps=step)
        if step % 80 == 0 and one.policy.admits(victim, steps_needed=512):
            ends_at = max(ends_at, step + 512)
        one.see(starving(A), [victim], now=3.1)
        step += 1

    assert step <= 1.2 * 512 + 2


def test_a_prompt_that_is_still_to_be_computed_is_part_of_what_a_drain_waits_for():
    one = drain()
    victim = view(B, running=1, remaining=5, prompt_left=36)  # in steps of eight tokens
    one.see(starving(A), [victim], now=3.1)

    assert one.policy.admits(victim, steps_needed=12)
    assert not one.policy.admits(victim, steps_needed=13)


# ── the deadline ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("steps", "turns"), [(17, []), (18, [Turn(B, A)]), (900, [Turn(B, A)])])
def test_at_its_deadline_the_victim_leaves_however_much_is_left(steps, turns):
    one = draining(victim=B, beneficiary=A, remaining=15)

    assert one.see(starving(A), [view(B, running=3, remaining=700, steps=steps)], now=4.0) == turns


def test_beyond_the_last_step_a_victim_stays_only_for_sequences_that_ran_at_the_start():
    one = drain()
    one.see(starving(A), [view(B, running=1, remaining=15, most_remaining=40, steps=100, seated_in=90)], now=3.1)

    for steps, seated_in, turns in [(117, 90, []), (118, 90, []), (147, 100, []), (118, 101, [Turn(B, A)])]:
        victim = view(B, running=1, remaining=700, steps=steps, seated_in=seated_in)
        assert one.see(starving(A), [victim], now=4.0) == turns, (steps, seated_in)
    assert one.see(starving(A), [view(B, running=1, steps=148, seated_in=90)], now=5.0) == [Turn(B, A)]


def test_a_victim_that_left_at_its_deadline_has_finished_its_drain():
    one = draining(victim=B, beneficiary=A)
    one.see([view(B, running=3, ran_at=4.0)], [view(A, running=1)], now=4.1)

    assert one.policy.draining_for == {}
    assert one.policy.reserved == frozenset()
    assert (one.told("finished"), one.told("called_off")) == (1, 0)


def test_a_victim_stays_beyond_its_deadline_while_its_successor_is_read_from_disk():
    one = draining(victim=B, beneficiary=A)
    late = [view(B, running=1, remaining=9, steps=18)]

    assert one.see(starving(A), late, now=4.0, being_read=frozenset({A})) == []
    assert one.see(starving(A), late, now=4.1) == [Turn(B, A)]


def test_parked_sequences_starve_like_requests_that_wait():
    one = drain()
    parked = view(A, running=2, ran_at=5.0)
    one.see([parked], busy(B), now=8.0)
    assert one.policy.draining_for == {}

    one.see([parked], busy(B), now=8.1)
    assert one.policy.draining_for == {B: A}


# ── how a drain ends ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_the_victim_has_finished_the_mark_is_cleared_and_its_slot_is_kept_for_the_adapter_it_drained_for():
    one = draining()
    one.see(starving(A), [view(B)], now=5.0, free=1)

    assert one.policy.draining_for == {}
    assert one.policy.reserved == {A}
    assert one.policy.ask_again_at(Slots(), now=5.0) == 5.0 + RESERVATION_S
    assert one.told("finished") == 1


def test_a_slot_that_is_kept_is_not_retaken_by_the_adapter_that_gave_it():
    one = draining()
    giver = view(B, waiting_since=0.0)
    one.see(starving(A), [giver], now=5.0, free=1)
    assert not one.policy.admits(giver, steps_needed=1)

    one.see([], [view(A, running=1)], now=5.1)
    assert one.policy.admits(giver, steps_needed=1), "its beneficiary sits, and nothing is owed any more"


def test_a_slot_that_is_kept_for_one_is_no_free_slot_for_another():
    one = draining()
    one.see(starving(A, D), [view(B), view(C, running=1, remaining=90)], now=5.0, free=1)

    assert one.policy.reserved == {A}
    assert one.policy.draining_for == {C: D}


def test_a_slot_is_not_kept_for_ever():
    one = draining()
    one.see(starving(A), [view(B)], now=5.0, free=1)
    one.see(starving(A), [view(B)], now=5.0 + RESERVATION_S, free=1)

    assert one.policy.reserved == frozenset()
    assert one.told("expired") == 1
    assert one.policy.admits(view(B), steps_needed=400)


def test_a_slot_is_kept_while_its_adapter_is_read_from_disk_and_for_the_usual_time_after_that():
    one, read = draining(), frozenset({A})
    one.see(starving(A), [view(B)], now=5.0, free=1, being_read=read)
    one.see(starving(A), [view(B)], now=7.0, free=1, being_read=read)
    assert one.policy.reserved == {A}

    one.see(starving(A), [view(B)], now=7.5, free=1)
    assert one.policy.ask_again_at(Slots(), now=7.5) == 7.5 + RESERVATION_S
    one.see(starving(A), [view(B)], now=7.5 + RESERVATION_S, free=1)
    assert (one.policy.reserved, one.told("expired")) == (frozenset(), 1)


def test_a_slot_is_not_kept_for_a_read_that_never_ends_and_none_drains_for_it_again():
    one, read = draining(), frozenset({A})
    one.see(starving(A), [view(B)], now=5.0, free=1, being_read=read)
    end = 5.0 + LONGEST_READ_S
    assert one.policy.ask_again_at(Slots(), now=5.0) == end

    one.see(starving(A), [view(B)], now=end, free=1, being_read=read)
    one.see(starving(A), busy(B), now=end + 9.0, being_read=read)
    assert (one.policy.reserved, one.policy.draining_for) == (frozenset(), {})
    assert one.told("expired") == 1

    one.see(starving(A), busy(B), now=end + 10.0)
    assert one.policy.draining_for == {B: A}, "it has come after all"


def test_a_slot_that_was_taken_in_time_has_not_expired():
    one = draining()
    one.see(starving(A), [view(B)], now=5.0, free=1)
    one.see([], [view(A, running=1)], now=99.0)

    assert one.policy.reserved == frozenset()
    assert one.told("expired") == 0


@pytest.mark.parametrize("how", ["cancelled or served", "unloaded"])
def test_a_drain_is_called_off_at_once_when_no_adapter_needs_it_any_more(how):
    one = draining()
    if how == "unloaded":
        one.policy.forget(A)
        assert one.policy.draining_for == {}
    one.see([], busy(B), now=3.2)

    assert one.policy.draining_for == {}
    assert one.policy.reserved == frozenset()
    assert one.policy.admits(view(B, running=1, remaining=15), steps_needed=400)
    assert (one.told("finished"), one.told("called_off")) == (0, 1)
    one.see([], busy(B), now=3.3)
    assert one.told("called_off") == 1, "each event is told once"


def test_an_unloaded_victim_or_beneficiary_leaves_no_record():
    one = draining(victim=B, beneficiary=A)
    one.see(starving(A), [view(B)], now=5.0, free=1)
    one.policy.forget(A)
    assert one.policy.beneficiaries == frozenset()

    other = draining(victim=B, beneficiary=A)
    other.policy.forget(B)
    assert other.policy.beneficiaries == frozenset()
    assert other.policy.ask_again_at(Slots(), now=5.0) == math.inf


def test_after_a_drain_the_next_adapter_that_starves_gets_its_own():
    one = draining(victim=B, beneficiary=A)
    one.see(starving(F), [view(A, running=1, remaining=30)], now=6.0)

    assert one.policy.draining_for == {A: F}
    assert (one.told("started"), one.told("finished")) == (2, 1)


# ── slots that have closed under their residents ─────────────────────────────────────────────────────────────────────


def test_as_many_residents_drain_for_an_adapter_as_must_leave_before_it_can_come():
    one = drain()
    for now in (4.0, 5.0):
        one.see(starving(A), busy(B, C, D), now, open=2)

    assert one.policy.draining_for == {B: A, C: A}
    assert one.told("started") == 2


def test_of_closed_slots_too_at_most_half_drain_at_once():
    one = drain()
    one.see(starving(A), busy(B, C, D, E, F), now=4.0, open=1)

    assert one.policy.draining_for == {B: A, C: A}


def test_a_second_adapter_that_starves_gets_one_drain_more():
    one = drain()
    one.see([*starving(A), *starving(F, since=0.5)], busy(B, C, D, E), now=4.0, open=3)
    assert one.policy.draining_for == {B: A, C: A}

    one.see([*starving(A), *starving(F, since=0.5)], busy(B, C, D, E, *range(20, 24)), now=4.1, open=7)
    assert one.policy.draining_for == {B: A, C: A, D: F}


def test_at_their_deadlines_the_first_only_leaves_and_the_adapter_comes_for_the_second():
    one = drain()
    one.see(starving(A), busy(B, C, D), now=4.0, open=2)
    over = [view(adapter, running=1, remaining=15, steps=99) for adapter in (B, C)]
    assert one.see(starving(A), [*over, *busy(D)], now=5.0, open=2) == [Turn(B, A), Turn(C, A)]

    assert one.see(starving(A), over, now=5.0, open=2) == [Turn(B, A)], "an adapter comes once"


def test_no_slot_is_kept_for_an_adapter_if_the_one_that_was_drained_for_it_has_closed():
    one = drain()
    one.see(starving(A), busy(B, C), now=4.0, open=1)
    for now in (5.0, 5.05):
        one.see(starving(A), [view(B), *busy(C)], now, open=1)
        assert one.policy.reserved == {A}

    one.see(starving(A), busy(C), now=5.1, open=1)
    assert one.policy.reserved == frozenset()
    assert one.policy.draining_for == {C: A}
