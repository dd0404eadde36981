"""What holds for every answer of `rotate`, whatever it is shown; its rules are in the files of its parts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.ids import AdapterId
from rota.policy.slot_policies.rotate import Rotate
from rota.policy.slot_policy import Turn
from rota.policy.visits import LOOK_EVERY, MOST_VISITS, PART_FOR_VISITS
from tests.policy.rotation import NOW, STEP_S, ago, newcomer, parked, resident, rotate_with, slots, turns
from tests.policy.views import A, Absent, B, C, D, E, F, Slots, View, view

ADAPTERS = range(1000, 1009)


@st.composite
def views(draw: st.DrawFn, number: int, is_resident: bool, now: float) -> View:
    running = draw(st.integers(0, 3))
    waits = draw(st.booleans())
    age = draw(st.sampled_from([0.0, 0.005, 0.05, 0.5, 5.0, 50.0]))
    return view(
        AdapterId(number),
        weight=draw(st.sampled_from([1.0, 1.0, 2.0, 10.0])),
        is_pinned=is_resident and draw(st.integers(0, 9)) == 0,
        waiting_since=now - age if waits or not (running or is_resident) else math.inf,
        running=running,
        ran_at=now - draw(st.sampled_from([0.0, 0.1, 0.2, 1.0, 30.0])),
        slot_since=now - draw(st.sampled_from([0.0, 0.03, 0.09, 2.0])),
        turn_steps=draw(st.integers(0, 9)),
        is_prefilling=bool(running) and draw(st.integers(0, 3)) == 0,
        blocks=running * draw(st.integers(1, 200)),
        attained=draw(st.integers(0, 500)),
        claims=draw(st.sampled_from([0.5, 1.0, 2.0, 8.0])),
    )


@st.composite
def sights(draw: st.DrawFn, total: int, now: float) -> Slots:
    """Any state of the slots: some adapters in them, some with work and without a slot, and some that are gone."""
    present = draw(st.lists(st.sampled_from(ADAPTERS), unique=True, max_size=len(ADAPTERS)))
    seated = draw(st.integers(0, min(total, len(present))))
    few = st.frozensets(st.sampled_from([AdapterId(one) for one in ADAPTERS]), max_size=3)
    return Slots(
        [draw(views(one, True, now)) for one in present[:seated]],
        Absent([draw(views(one, False, now)) for one in present[seated:]]),
        copies=draw(st.integers(-1, 3)),
        step_s=STEP_S,
        being_read=draw(few),
        unable=draw(few),
        staying=draw(few),
        free_blocks=draw(st.integers(0, 1000)),
        open=draw(st.sampled_from([total, total, 1])),  # slots may have closed under their residents
    )


def check(policy: Rotate, seen: Slots, now: float) -> None:
    policy.observe(seen, now)
    found = policy.turns(seen, now)
    leavers, successors = [turn.leaver for turn in found], [turn.successor for turn in found]
    assert len(found) <= max(0, seen.copies)
    assert len({*leavers}) == len(leavers), "an adapter leaves twice"
    assert len({*successors}) == len(successors), "an adapter comes twice"
    for turn in found:
        leaver = next(one for one in seen.residents if one.adapter_id == turn.leaver)
        assert seen.may_leave(turn.leaver)
        assert not leaver.is_pinned
        assert not leaver.is_prefilling
        assert turn.successor in seen.absent
        assert seen.is_at_hand(turn.successor)
    line = [one.adapter_id for one in policy.line(seen, now)]
    assert len({*line}) == len(line)
    assert all(one in seen.absent and seen.is_at_hand(one) for one in line)
    assert policy.prompts_only <= {one.adapter_id for one in seen.residents}
    assert policy.ask_again_at(seen, now) > now
    assert all(policy.admits(one, 9) for one in seen.residents if not one.running)
    assert found == policy.turns(seen, now), "a question changed something"


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(1, 4),
    st.sampled_from([None, 0.02, 0.5]),
    st.sampled_from([None, None, 0.1, 1.0]),
)
def test_no_adapter_leaves_or_comes_twice_and_none_that_may_not(data, total, turn_s, max_stall_s):
    policy = Rotate(turn_s, max_stall_s)
    for number in range(data.draw(st.integers(1, 8))):
        now = NOW + number * data.draw(st.sampled_from([STEP_S, 1.0]))
        check(policy, data.draw(sights(total, now)), now)


def remembered(thing: Any) -> set[int]:
    """The adapters that are found in anything that an object holds."""
    if isinstance(thing, int):
        return {thing} & {*ADAPTERS}
    if isinstance(thing, dict):
        return {one for pair in thing.items() for part in pair for one in remembered(part)}
    if isinstance(thing, list | tuple | set | frozenset):
        return {one for part in thing for one in remembered(part)}
    if isinstance(thing, View):
        return remembered(int(thing.adapter_id))
    return remembered(vars(thing)) if hasattr(thing, "__dict__") else set()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([None, 1.0]))
def test_nothing_is_remembered_about_adapters_that_are_gone(data, total, max_stall_s):
    policy = Rotate(max_stall_s=max_stall_s)
    for _ in range(data.draw(st.integers(1, 6))):
        policy.observe(data.draw(sights(total, NOW)), NOW)
    for number in ADAPTERS:
        policy.forget(AdapterId(number))
    for _ in range(LOOK_EVERY):
        policy.observe(Slots(step_s=STEP_S), NOW)

    assert remembered(policy) == set()


def test_the_line_for_a_free_slot_is_settled_ones_that_were_out_for_long_newcomers_stalled_ones_and_the_rest():
    policy = rotate_with([resident(A), resident(B)])
    out, soon = parked(A, ran_at=ago(50), claims=10.0), parked(B, ran_at=ago(2), claims=10.0)
    stalled, other = parked(C, ran_at=ago(40)), parked(D, ran_at=ago(3), claims=2.0)
    absent = [other, stalled, soon, newcomer(E, since=ago(20)), out]
    seen = slots([resident(F, claims=1.0), resident(AdapterId(9), claims=1.0)], absent)
    for _ in range(LOOK_EVERY):
        policy.observe(seen, NOW)

    assert [one.adapter_id for one in policy.line(seen, NOW)] == [A, E, C, B, D]


def test_newcomers_are_due_before_parked_adapters_and_both_by_arrival():
    due = [newcomer(A, since=3.0), newcomer(B, since=5.0), parked(C)]
    policy = Rotate()
    assert sorted(due, key=policy.due_at) == due


def test_ties_are_told_apart_by_id_in_whatever_order_they_are_seen():
    pair = [resident(A), resident(B)]
    for order in itertools.permutations([newcomer(C), newcomer(D), newcomer(E)]):
        for residents in (pair, pair[::-1]):
            assert turns(rotate_with(residents), slots(residents, order)) == [Turn(B, C), Turn(A, D)]


def test_while_weights_share_the_slots_a_visit_for_a_first_token_is_none_for_the_tokens_after_it():
    settled = [resident(A), resident(B, weight=2.0)]
    policy = rotate_with(settled)
    visit = resident(C, turn_steps=1, claims=1.0, weight=2.0)
    policy.observe(slots([settled[0], visit], [parked(B, weight=2.0, claims=10.0)]), NOW)
    assert policy.prompts_only == {C}
    policy.observe(slots([settled[0], visit]), NOW)
    assert policy.prompts_only == frozenset(), "no adapter waits for its slot"


def test_a_visitor_has_all_its_tokens_while_no_settled_adapter_could_run_instead():
    policy = rotate_with([resident(A), resident(B, weight=2.0)])
    visit = resident(C, turn_steps=1, claims=1.0, weight=2.0)
    out = [parked(A, claims=10.0), parked(B, weight=2.0, claims=10.0)]
    for beside in ([], [resident(A, running=0, claims=10.0)]):
        policy.observe(slots([visit, *beside], out[len(beside) :]), NOW)
        assert policy.prompts_only == frozenset()


def test_there_are_never_more_visits_than_two_or_a_quarter_of_the_slots():
    many = [resident(AdapterId(number), claims=20.0) for number in range(10, 26)]
    absent = [newcomer(AdapterId(number)) for number in range(100, 120)]
    absent += [parked(AdapterId(number), ran_at=ago(30)) for number in range(200, 210)]
    assert len(turns(rotate_with(many), slots(many, absent))) == len(many) // PART_FOR_VISITS
    assert len(turns(rotate_with(many[:8]), slots(many[:8], absent))) == MOST_VISITS


@pytest.mark.parametrize(("waited_steps", "came_before", "leaves"), [(99, 9, False), (130, 9, True), (130, -9, False)])
def test_a_resident_with_prompts_stays_but_not_for_prompts_behind_an_adapter_that_waits_too_long(
    waited_steps, came_before, leaves
):
    policy = rotate_with([resident(A)])
    busy = resident(A, waiting_since=ago(waited_steps - came_before))
    seen = slots([busy], [newcomer(B, since=ago(waited_steps))])

    assert turns(policy, seen) == ([Turn(A, B)] if leaves else [])


def test_residents_of_closed_slots_count_as_no_visits():
    policy = rotate_with([resident(one) for one in (A, B, C, D, E)])
    visitors = [resident(one, claims=1.0, is_prefilling=True) for one in (B, C)]
    seen = slots([resident(A), *visitors, resident(D), resident(E)], [newcomer(F)], open=3)

    assert [turn.successor for turn in turns(policy, seen)] == [F]
    assert sorted(policy._settled) == [A, D, E]
