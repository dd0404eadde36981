from __future__ import annotations

import math

import pytest

from rota.core.ids import AdapterId
from rota.policy.slot_policies.rotate import LATE_STEPS, STEADY_STEPS
from rota.policy.slot_policy import Turn
from rota.policy.visits import CROWD_TURN_STEPS, LOOK_EVERY, TURN_STEPS, VISITS_AHEAD, least_promise_s
from tests.policy.rotation import NOW, ago, newcomer, parked, resident, rotate_with, slots, turns
from tests.policy.views import A, Absent, B, C, D, E, F, Slots, View

LEAST, SECOND, LARGEST = resident(A, claims=10.0), resident(B, claims=20.0), resident(C, claims=30.0)
SETTLED = (LEAST, SECOND, LARGEST)


# ── newcomers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_newcomer_comes_at_once_and_the_settled_adapter_with_the_smallest_claim_steps_aside():
    assert turns(rotate_with(SETTLED), slots(SETTLED, [newcomer(D)])) == [Turn(A, D)]


def test_at_most_two_newcomers_visit_at_a_time_first_come_first():
    absent = [newcomer(D, since=ago(1)), newcomer(E, since=ago(3)), newcomer(F, since=ago(2))]
    assert turns(rotate_with(SETTLED), slots(SETTLED, absent)) == [Turn(A, E), Turn(B, F)]

    visits = resident(D, is_prefilling=True, turn_steps=1)
    policy = rotate_with(SETTLED)
    seen = slots([visits, SECOND, LARGEST], [LEAST, *absent[1:]])
    assert [turn.successor for turn in turns(policy, seen)] == [E]


def test_no_more_come_than_copies_can_be_made():
    seen = slots(SETTLED, [newcomer(D), newcomer(E)], copies=1)
    assert turns(rotate_with(SETTLED), seen) == [Turn(A, D)]
    assert turns(rotate_with(SETTLED), slots(SETTLED, [newcomer(D)], copies=0)) == []


@pytest.mark.parametrize(
    ("stays", "named"),
    [
        (resident(A, since=ago(STEADY_STEPS - 1)), {}),
        (resident(A, is_prefilling=True), {}),
        (resident(A, waiting_since=ago(1)), {}),
        (resident(A, is_pinned=True), {}),
        (resident(A), {"staying": frozenset({A})}),
    ],
    ids=["came lately", "computes a prompt", "is about to start one", "is pinned", "waits for its first step"],
)
def test_a_settled_adapter_does_not_step_aside_if_it(stays, named):
    assert turns(rotate_with([LEAST]), slots([stays], [newcomer(D)], **named)) == []


@pytest.mark.parametrize(("came", "leaves"), [(LATE_STEPS + 1, True), (LATE_STEPS - 1, False)])
def test_prompts_that_came_after_a_newcomer_that_waits_too_long_keep_no_resident(came, leaves):
    """Another newcomer came a moment ago: the one that waits for longest counts."""
    is_about_to_start_one = resident(A, waiting_since=ago(50))
    absent = [newcomer(D, since=ago(came)), newcomer(E, since=ago(1))]
    found = turns(rotate_with([LEAST]), slots([is_about_to_start_one], absent))
    assert found == ([Turn(A, D)] if leaves else [])


def test_a_weight_scales_the_claim_by_which_settled_adapters_step_aside_and_come_back():
    light, heavy = (A, {"claims": 10.0}), (B, {"claims": 6.0, "weight": 2.0})
    policy = rotate_with([resident(one, **given) for one, given in (light, heavy)])
    assert turns(policy, slots([resident(one, **given) for one, given in (light, heavy)], [newcomer(C)])) == [
        Turn(A, C)
    ]

    visits = [resident(C, turn_steps=1, claims=1.0), resident(D, is_prefilling=True, claims=1.0)]
    out = [parked(one, ran_at=ago(50), **given) for one, given in (light, heavy)]
    assert turns(policy, slots(visits, out)) == [Turn(C, B)]


def test_a_settled_adapter_whose_requests_lack_kv_steps_aside():
    waits = resident(A, waiting_since=ago(9))
    assert turns(rotate_with([LEAST]), slots([waits], [newcomer(D)], unable=frozenset({A}))) == [Turn(A, D)]


def test_a_newcomer_leaves_after_the_step_of_its_first_token_and_not_before():
    policy = rotate_with(SETTLED)
    for visit, comes_back in (
        (resident(D, is_prefilling=True, turn_steps=1, claims=1.0), []),
        (resident(D, turn_steps=0, claims=1.0), []),
        (resident(D, turn_steps=1, claims=1.0), [Turn(D, A)]),
    ):
        seen = slots([visit, SECOND, LARGEST], [parked(A, claims=10.0)])
        assert turns(policy, seen) == comes_back


def test_a_visit_that_is_over_makes_room_before_a_settled_adapter_does():
    policy = rotate_with(SETTLED)
    over, small = resident(D, turn_steps=1, claims=12.0), resident(B, claims=11.0)
    assert turns(policy, slots([over, small, LARGEST], [parked(A, claims=10.0), newcomer(E)])) == [Turn(D, E)]


def test_a_settled_adapter_that_was_out_for_long_comes_back_before_a_newcomer_comes():
    policy = rotate_with(SETTLED)
    over = resident(D, turn_steps=1, claims=1.0)
    late, soon = parked(A, ran_at=ago(STEADY_STEPS), claims=10.0), parked(A, ran_at=ago(1), claims=10.0)

    assert turns(policy, slots([over, SECOND, LARGEST], [late, newcomer(E)]))[0] == Turn(D, A)
    assert turns(policy, slots([over, SECOND, LARGEST], [soon, newcomer(E)])) == [Turn(D, E)]


def test_a_newcomer_that_lacks_kv_or_is_still_being_read_is_passed_over():
    absent = [newcomer(D, since=ago(3)), newcomer(E, since=ago(2)), newcomer(F, since=ago(1))]
    seen = slots(SETTLED, absent, unable=frozenset({D}), being_read=frozenset({E}))
    assert [turn.successor for turn in turns(rotate_with(SETTLED), seen)] == [F]


@pytest.mark.parametrize(("lacking", "comes"), [(VISITS_AHEAD - 1, True), (VISITS_AHEAD, False)])
def test_no_more_than_a_few_newcomers_that_lack_kv_are_passed_over(lacking, comes):
    before = [newcomer(AdapterId(100 + one), since=ago(9)) for one in range(lacking)]
    seen = slots(SETTLED, [*before, newcomer(D)], unable=frozenset(one.adapter_id for one in before))
    assert turns(rotate_with(SETTLED), seen) == ([Turn(A, D)] if comes else [])


@pytest.mark.parametrize("pause", [30, 132, 10_000])
def test_first_tokens_come_at_once_however_long_answers_pause(pause):
    policy = rotate_with(SETTLED)
    absent = [parked(F, ran_at=ago(pause)), newcomer(D, since=ago(0)), newcomer(E, since=ago(0))]
    assert [turn.successor for turn in turns(policy, slots(SETTLED, absent))] == [D, E]


# ── KV ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settled_blocks", "parked_blocks", "prompt_blocks", "comes"),
    [
        (500, 99, 1, True),  # a tenth of all blocks may always be held by adapters that are not settled
        (500, 100, 1, False),
        (300, 100, 1, True),  # 1000 less twice 300: 400 may be
        (300, 399, 1, True),
        (300, 399, 2, False),
        (300, 400, 1, False),
    ],
)
def test_newcomers_start_only_while_settled_adapters_keep_room_to_finish(
    settled_blocks, parked_blocks, prompt_blocks, comes
):
    holding = resident(A, blocks=settled_blocks)
    absent = [parked(B, blocks=parked_blocks), newcomer(C)]
    seen = slots([holding], absent, blocks=1000, free_blocks=1000, prompt_blocks=prompt_blocks)

    assert (turns(rotate_with([LEAST]), seen) == [Turn(A, C)]) is comes


# ── turns after a pause ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("others", "pause", "has_turn"),
    [
        (0, 14.5, False),
        (0, 15.5, True),
        (2, 15.5, True),  # as many are parked as there are slots: rotation
        (3, 29.0, False),  # one round of four turns: 4 · (10 + 1) steps for two at a time, and 3/4 of them are turns
        (3, 30.0, True),
        (40, 300.0, False),
        (40, 301.0, True),
    ],
)
def test_a_parked_adapter_has_a_turn_after_fifteen_steps_and_in_a_crowd_after_one_round_over_all(
    others, pause, has_turn
):
    absent = [parked(D, ran_at=ago(pause)), *(parked(AdapterId(100 + one)) for one in range(others))]
    expected = [Turn(A, D)] if has_turn else []
    assert turns(rotate_with(SETTLED), slots(SETTLED, absent)) == expected


# Of eleven that are parked in a crowd one has paused for long; a round takes 80.7 steps.
@pytest.mark.parametrize(
    ("pause", "stood", "given", "has_turn"),
    [
        (73.0, 1.0, {}, True),  # nine tenths of a round
        (72.0, 1.0, {}, False),
        (80.0, -1.0, {}, False),  # it has text still
        (81.0, -1.0, {}, True),
        (80.0, 1.0, {"max_stall_s": 1.5}, False),  # what is promised is a longest pause, for all alike
        (121.0, -1.0, {"max_stall_s": 1.5}, True),
    ],
)
def test_in_a_crowd_a_turn_comes_sooner_to_an_adapter_whose_reader_has_no_text(pause, stood, given, has_turn):
    pauses = parked(D, ran_at=ago(pause), stands_since=ago(stood))
    absent = [pauses, *(parked(AdapterId(100 + one)) for one in range(10))]
    found = turns(rotate_with(SETTLED, **given), slots(SETTLED, absent))
    assert found == ([Turn(A, D)] if has_turn else [])


def test_beside_a_few_readers_change_nothing():
    absent = [parked(D, ran_at=ago(14), stands_since=ago(10))]
    assert turns(rotate_with(SETTLED), slots(SETTLED, absent)) == []


def test_an_adapter_whose_reader_has_text_is_passed_over():
    has_text, has_none = (parked(one, ran_at=ago(75), stands_since=ago(at)) for one, at in ((D, -1), (E, 1)))
    seen = slots(SETTLED, [has_text, has_none, *(parked(AdapterId(100 + one)) for one in range(9))])
    assert turns(rotate_with(SETTLED), seen) == [Turn(A, E)]


def test_a_turn_in_a_crowd_is_longer_than_beside_a_few():
    few, crowd = [parked(A, claims=10.0)], [parked(AdapterId(100 + one), claims=0.0) for one in range(9)]
    for others, steps in ((few, TURN_STEPS), ([*few, *crowd], CROWD_TURN_STEPS)):
        policy = rotate_with(SETTLED)
        turns(policy, slots([LEAST, SECOND, LARGEST], [parked(D, ran_at=ago(500)), *others[1:]]))
        for stayed, comes_back in ((steps - 1, []), (steps, [Turn(D, A)])):
            on_turn = resident(D, turn_steps=stayed, claims=1.0)
            assert turns(policy, slots([on_turn, SECOND, LARGEST], others)) == comes_back


@pytest.mark.parametrize(
    ("given", "others", "copy_s", "promised_s"),
    [
        ({}, 0, 0.0, 0.4),  # a turn of six steps and a change of two are a fifth of it
        ({}, 0, 0.02, 0.5),
        ({}, 9, 0.02, 0.5),
        ({}, 29, 0.0, 1.4),  # one round over thirty: 30 · (6 + 1) / 1.5 steps
        ({"turn_s": 0.5}, 0, 0.0, 2.6),  # a turn as long as the operator says
        ({"turn_s": 0.02}, 0, 0.02, 0.3),
        ({"turn_s": 0.5, "max_stall_s": 1.0}, 29, 0.0, 30 * 0.51 / 1.5),
    ],
)
def test_what_can_be_promised_goes_by_a_turn_and_a_change_and_by_the_round_over_all_that_are_parked(
    given, others, copy_s, promised_s
):
    policy = rotate_with(SETTLED, **given)
    seen = slots(SETTLED, [parked(D), *(parked(AdapterId(100 + one)) for one in range(others))], copy_s=copy_s)
    policy.observe(seen, NOW)
    assert policy.promisable_s(seen) == pytest.approx(promised_s)


def test_before_the_first_copy_the_least_promise_goes_by_a_turn_and_a_change_alone():
    assert least_promise_s(0.01) == least_promise_s(0.01, copy_s=0.0) == pytest.approx(0.4)


def test_nothing_can_be_promised_while_kv_is_short():
    policy = rotate_with([resident(A, blocks=5)])
    seen = slots([resident(A, blocks=5)], [parked(D)], free_blocks=4)
    policy.observe(seen, NOW)
    assert policy.promisable_s(seen) == math.inf


def test_no_turns_while_kv_is_short():
    holding = [resident(one.adapter_id, one.claims, blocks=100) for one in SETTLED]
    absent = [parked(D, ran_at=ago(20))]
    assert turns(rotate_with(SETTLED), slots(holding, absent, free_blocks=299)) == []
    assert turns(rotate_with(SETTLED), slots(holding, absent, free_blocks=300)) == [Turn(A, D)]


def on_turn(adapter_id: AdapterId, steps: int, **fields) -> View:
    return resident(adapter_id, claims=1.0, since=ago(steps), turn_steps=steps, **fields)


@pytest.mark.parametrize(
    ("given", "steps", "is_over"),
    [({}, 2, False), ({}, 3, True), ({"turn_s": 0.095}, 9, False), ({"turn_s": 0.095}, 10, True)],
)
def test_a_turn_takes_three_steps_or_as_long_as_the_operator_says(given, steps, is_over):
    policy = rotate_with([LEAST], **given)
    assert turns(policy, slots([LEAST], [parked(D, ran_at=ago(20))])) == [Turn(A, D)]

    seen = slots([on_turn(D, steps)], [parked(A, claims=10.0)])
    assert turns(policy, seen) == ([Turn(D, A)] if is_over else [])


def test_a_newcomer_cuts_a_turn_short_and_another_turn_does_not():
    policy = rotate_with(SETTLED)
    assert turns(policy, slots(SETTLED, [parked(D, ran_at=ago(20))])) == [Turn(A, D)]
    residents = [on_turn(D, 1), resident(B, since=ago(1)), resident(C, since=ago(1))]

    steps_aside = parked(A, claims=10.0)

    assert turns(policy, slots(residents, [steps_aside, parked(E, ran_at=ago(20))])) == []
    assert turns(policy, slots(residents, [steps_aside, newcomer(E)])) == [Turn(D, E)]


def test_two_turns_at_a_time_the_longest_pause_first():
    absent = [parked(D, ran_at=ago(20)), parked(E, ran_at=ago(40)), parked(F, ran_at=ago(30))]
    assert turns(rotate_with(SETTLED), slots(SETTLED, absent)) == [Turn(A, E), Turn(B, F)]


# ── a promise ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("parked_ones", "comes"), [(21, True), (22, False)])
def test_with_a_promise_newcomers_wait_while_more_are_parked_than_can_have_a_turn_in_time(parked_ones, comes):
    """A turn of six steps and its copy take 70 ms, two at a time: 28 in a second. Three in four are promised."""
    policy = rotate_with(SETTLED, max_stall_s=1.0)
    absent = [parked(AdapterId(100 + one)) for one in range(parked_ones)]
    assert (turns(policy, slots(SETTLED, [*absent, newcomer(D)])) == [Turn(A, D)]) is comes


def test_with_a_promise_turns_do_not_become_rarer():
    absent = [parked(AdapterId(100 + one), ran_at=NOW - 0.81) for one in range(30)]
    assert len(turns(rotate_with(SETTLED, max_stall_s=1.0), slots(SETTLED, absent))) == 2
    assert turns(rotate_with(SETTLED), slots(SETTLED, absent)) == []
    early = [parked(AdapterId(100 + one), ran_at=NOW - 0.79) for one in range(30)]
    assert turns(rotate_with(SETTLED, max_stall_s=1.0), slots(SETTLED, early)) == []


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counting(Slots):
    """Counts how often a policy asks about one adapter."""

    looks = 0

    def is_at_hand(self, adapter_id):
        Counting.looks += 1
        return super().is_at_hand(adapter_id)

    def can_start(self, adapter_id):
        Counting.looks += 1
        return super().can_start(adapter_id)


@pytest.mark.parametrize("kind", [parked, newcomer])
@pytest.mark.parametrize("lacks", ["being_read", "unable", "nothing"])
def test_passes_look_at_no_more_adapters_when_four_times_as_many_are_absent(kind, lacks):
    found = []
    for count in (100, 400):
        absent = [kind(AdapterId(number), ago(500)) for number in range(10, 10 + count)]
        named = {} if lacks == "nothing" else {lacks: frozenset(one.adapter_id for one in absent)}
        policy = rotate_with(SETTLED, max_stall_s=1.0)
        Counting.looks = 0
        for _ in range(LOOK_EVERY):
            turns(policy, Counting([*SETTLED], Absent(absent), **named))
        found.append(Counting.looks)

    assert found[0] == found[1] < 150 * LOOK_EVERY
