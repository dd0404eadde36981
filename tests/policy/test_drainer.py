from __future__ import annotations

import itertools
import math

import pytest

from rota.policy.drainer import RESERVATION_S, LoRADrainer
from tests.policy.views import A, B, C, D, E, F, view, views


def drainer(slots: int = 1, max_wait_s: float = 3.0) -> LoRADrainer:
    return LoRADrainer(max_wait_s, slots)


def draining(victim=B, beneficiary=A, remaining: int = 15, now: float = 3.1) -> LoRADrainer:
    """A drainer of one slot in which `victim` drains since `now`."""
    one = drainer()
    one.observe(views(view(beneficiary, waiting_since=0.0)), residents(victim, remaining=remaining), 0, now)
    assert one.draining_for == {victim: beneficiary}
    return one


def starving(*adapters, since: float = 0.0):
    return views(*(view(adapter_id, waiting_since=since) for adapter_id in adapters))


def residents(*adapters, remaining: int = 15):
    return views(*(view(adapter_id, running=1, remaining=remaining) for adapter_id in adapters))


def told(one: LoRADrainer, state: str) -> int:
    """How often it told of drains that came to this."""
    return sum(news.state == state for news in one.news)


# ── who drains for whom ──────────────────────────────────────────────────────────────────────────────────────────────


def test_starving_adapters_longest_wait_first_get_the_residents_with_the_least_left():
    one = drainer(slots=2)
    blocked = views(view(D, waiting_since=0.04), view(A, waiting_since=0.0))
    seated = views(view(C, running=1, remaining=100), view(B, running=1, remaining=5))
    one.observe(blocked, seated, free_slots=0, now=3.05)

    assert one.draining_for == {B: A, C: D}
    assert told(one, "started") == 2


@pytest.mark.parametrize(("now", "victims"), [(3.0, set()), (math.nextafter(3.0, 4.0), {B})])
def test_a_wait_must_be_strictly_over_the_threshold(now, victims):
    one = drainer()
    one.observe(starving(A), residents(B), free_slots=0, now=now)

    assert one.draining_for.keys() == victims


def test_nobody_drains_while_a_slot_can_be_had():
    one = drainer()
    one.observe(starving(A), residents(B), free_slots=1, now=9.0)

    assert one.draining_for == {}


def test_one_drain_is_enough_for_one_who_starves():
    one = drainer(slots=4)
    for now in (4.0, 5.0, 6.0):
        one.observe(starving(A), residents(B, C, D), free_slots=0, now=now)

    assert one.draining_for == {B: A}
    assert told(one, "started") == 1


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 3)])
def test_at_most_half_of_the_slots_drain_at_once_and_of_two_both_may(slots, most):
    one = drainer(slots)
    everybody = range(1, 2 * slots + 1)
    one.observe(starving(*everybody[slots:]), residents(*everybody[:slots]), free_slots=0, now=9.0)

    assert len(one.draining_for) == most


def test_who_drains_is_no_beneficiary_so_that_drains_do_not_cascade():
    one = draining(victim=B, beneficiary=A)
    # Its own requests now starve as well, since it may not admit them.
    blocked = views(view(A, waiting_since=0.0), view(B, waiting_since=0.1, running=1, remaining=15))
    one.observe(blocked, residents(B, C), free_slots=0, now=9.0)

    assert one.draining_for == {B: A}


def test_nobody_drains_for_itself():
    one = drainer(slots=2)
    both = views(view(A, waiting_since=0.0, running=1, remaining=3), view(B, running=1, remaining=50))
    one.observe(starving(C), both, free_slots=0, now=9.0)

    assert one.draining_for == {A: C}


def test_a_higher_priority_than_all_a_resident_has_makes_it_drain_at_once():
    one = drainer(max_wait_s=math.inf)
    urgent = views(view(A, waiting_since=0.0, priority=1))
    one.observe(urgent, residents(B), free_slots=0, now=0.0)

    assert one.draining_for == {B: A}


def test_no_resident_drains_for_a_priority_that_is_not_above_its_own():
    one = drainer(max_wait_s=math.inf)
    seated = views(view(B, running=1, remaining=5, priority=1))
    one.observe(views(view(A, waiting_since=0.0, priority=1)), seated, free_slots=0, now=999.0)

    assert one.draining_for == {}


def test_of_those_who_may_drain_the_lowest_priority_does_before_the_least_work():
    one = drainer()
    seated = views(view(B, running=1, remaining=5, priority=1), view(C, running=1, remaining=90))
    one.observe(starving(A), seated, free_slots=0, now=9.0)

    assert one.draining_for == {C: A}


def test_a_pinned_adapter_is_never_the_victim_however_little_it_has_left():
    one = drainer(slots=2)
    pinned = view(B, running=1, remaining=1, is_pinned=True)
    one.observe(starving(A), views(pinned, view(C, running=1, remaining=400)), free_slots=0, now=9.0)

    assert one.draining_for == {C: A}


def test_with_nothing_but_pinned_residents_nobody_drains():
    one = drainer()
    one.observe(starving(A), views(view(B, running=1, is_pinned=True)), free_slots=0, now=9.0)

    assert one.draining_for == {}


def test_equal_waits_and_equal_work_are_told_apart_by_id_in_whatever_order_they_are_seen():
    for order in itertools.permutations((C, D, E)):
        one = drainer(slots=3)
        one.observe(starving(B, A), residents(*order, remaining=7), free_slots=0, now=9.0)
        assert one.draining_for == {C: A, D: B}


# ── what a draining adapter may take on ──────────────────────────────────────────────────────────────────────────────


def test_a_draining_adapter_takes_on_what_ends_before_its_drain_does():
    one = draining(remaining=15)
    victim = view(B, running=1, remaining=15)

    assert one.admits(victim, steps_needed=10)
    assert one.admits(victim, steps_needed=18)
    assert not one.admits(victim, steps_needed=19)
    assert not one.admits(victim, steps_needed=20)


def test_others_take_on_what_they_like():
    assert draining(victim=B).admits(view(C, running=1, remaining=5), steps_needed=4096)


def test_the_budget_of_a_drain_only_shrinks():
    one = draining(remaining=10)  # twelve steps to go

    longest = []
    for step in range(14):
        # A newcomer that just fits does not move the deadline, whatever is left to do for it.
        victim = view(B, running=1, remaining=12 - step, steps=step)
        one.observe(starving(A), views(victim), free_slots=0, now=3.2)
        longest.append(max(needed for needed in range(20) if needed == 0 or one.admits(victim, needed)))
    assert longest == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_a_stream_of_long_requests_does_not_keep_a_drain_open():
    """Where a drain's bar is 1.2 × what is left now, this one is still open after 20,000 steps."""
    one = draining(remaining=512)
    ends_at, step = 512, 0
    while one.draining_for:
        victim = view(B, running=int(step < ends_at), remaining=ends_at - step, steps=step)
        if step % 80 == 0 and one.admits(victim, steps_needed=512):
            ends_at = max(ends_at, step + 512)
        one.observe(starving(A), views(victim), free_slots=0, now=3.1)
        step += 1

    assert step <= 1.2 * 512 + 2


# ── how a drain ends ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_the_victim_has_finished_the_mark_is_cleared_and_its_slot_is_kept_for_whom_it_drained():
    one = draining()
    one.observe(starving(A), views(view(B)), free_slots=1, now=5.0)

    assert one.draining_for == {}
    assert one.reserved == {A}
    assert one.reserved_until == 5.0 + RESERVATION_S
    assert told(one, "finished") == 1


def test_a_slot_that_is_kept_is_not_retaken_by_who_gave_it():
    one = draining()
    giver = view(B, waiting_since=0.0)
    one.observe(starving(A), views(giver), free_slots=1, now=5.0)
    assert not one.admits(giver, steps_needed=1)

    one.observe({}, views(view(A, running=1)), free_slots=0, now=5.1)
    assert one.admits(giver, steps_needed=1), "its beneficiary sits, and nothing is owed any more"


def test_a_slot_that_is_kept_for_one_is_no_free_slot_for_another():
    one = draining()
    one.observe(starving(A, D), views(view(B), view(C, running=1, remaining=90)), free_slots=1, now=5.0)

    assert one.reserved == {A}
    assert one.draining_for == {C: D}


def test_a_slot_is_not_kept_for_ever():
    one = draining()
    one.observe(starving(A), views(view(B)), free_slots=1, now=5.0)
    one.observe(starving(A), views(view(B)), free_slots=1, now=5.0 + RESERVATION_S)

    assert one.reserved == frozenset()
    assert told(one, "expired") == 1
    assert one.admits(view(B), steps_needed=400)


def test_a_slot_that_was_taken_in_time_has_not_expired():
    one = draining()
    one.observe(starving(A), views(view(B)), free_slots=1, now=5.0)
    one.observe({}, views(view(A, running=1)), free_slots=0, now=99.0)

    assert one.reserved == frozenset()
    assert told(one, "expired") == 0


@pytest.mark.parametrize("how", ["cancelled or served", "unloaded"])
def test_a_drain_is_called_off_at_once_when_nobody_needs_it_any_more(how):
    one = draining()
    if how == "unloaded":
        one.forget(A)
    else:
        one.observe({}, residents(B), free_slots=0, now=3.2)

    assert one.draining_for == {}
    assert one.reserved == frozenset()
    assert one.admits(view(B, running=1, remaining=15), steps_needed=400)
    assert (told(one, "finished"), told(one, "called_off")) == (0, 1)


def test_an_unloaded_victim_or_beneficiary_leaves_no_record():
    one = draining(victim=B, beneficiary=A)
    one.observe(starving(A), views(view(B)), free_slots=1, now=5.0)
    one.forget(A)
    assert one.beneficiaries == frozenset()

    other = draining(victim=B, beneficiary=A)
    other.forget(B)
    assert other.beneficiaries == frozenset()
    assert other.reserved_until == math.inf


def test_after_a_drain_the_next_one_who_starves_gets_its_own():
    one = draining(victim=B, beneficiary=A)
    one.observe(starving(F), views(view(A, running=1, remaining=30)), free_slots=0, now=6.0)

    assert one.draining_for == {A: F}
    assert (told(one, "started"), told(one, "called_off")) == (2, 1)
