from __future__ import annotations

import pytest

from rota.core.ids import AdapterId
from rota.policy.visits import LOOK_AHEAD, LOOK_EVERY, Settled
from tests.policy.rotation import NOW, newcomer, parked, resident, slots
from tests.policy.views import A, B, C, D, Slots


def look(settled: Settled, seen: Slots) -> list[AdapterId]:
    """So many passes that claims are compared; gives the settled adapters."""
    for _ in range(LOOK_EVERY):
        settled.observe(seen, NOW)
    return sorted(settled)


def settled_with(*adapters: AdapterId) -> Settled:
    settled = Settled()
    settled.observe(slots([resident(one) for one in adapters]), NOW)
    assert sorted(settled) == sorted(adapters)
    return settled


def test_as_many_are_settled_as_there_are_slots_and_the_others_come_by_their_claims():
    settled = Settled()
    absent = [parked(A, claims=1.0), newcomer(B, claims=4.0), parked(C, claims=3.0)]
    settled.observe(slots([], absent, open=2), NOW)
    assert sorted(settled) == [B, C]
    settled.observe(slots([], [*absent[:2], parked(C), parked(D, claims=2.0)], open=2), NOW)

    assert sorted(settled) == [B, C]
    assert look(settled, slots([], [*absent, parked(D, claims=2.0)], open=2))
    assert settled.next == [D, A]


@pytest.mark.parametrize(
    ("claims", "free_blocks", "is_replaced"),
    [(1.4, 900, False), (1.6, 900, True), (2.9, 99, False), (3.1, 99, True), (2.9, 100, True)],
)
def test_a_settled_adapter_stays_until_a_claim_is_half_as_large_again_or_three_times_while_kv_is_short(
    claims, free_blocks, is_replaced
):
    settled = settled_with(A)
    seen = slots([resident(A, claims=1.0, blocks=100)], [parked(B, claims=claims)], free_blocks=free_blocks)

    assert look(settled, seen) == [B if is_replaced else A]


def test_claims_are_compared_only_every_few_passes_but_a_free_place_is_filled_at_once():
    settled = settled_with(A)
    for _ in range(LOOK_EVERY - 2):
        settled.observe(slots([resident(A, claims=1.0)], [parked(B, claims=9.0)]), NOW)
    assert sorted(settled) == [A]

    settled = settled_with(A)
    settled.observe(slots([resident(A, running=0)], [newcomer(B, claims=0.1)]), NOW)
    assert sorted(settled) == [B], "an adapter without work is settled no longer"


def test_an_adapter_that_is_gone_is_settled_no_longer():
    settled = settled_with(A, B)
    settled.observe(slots([resident(A)]), NOW)
    assert sorted(settled) == [A]

    settled.forget(A)
    assert sorted(settled) == []


def test_each_larger_claim_takes_the_place_of_the_smallest_that_is_left():
    settled = settled_with(A, B)
    residents = [resident(A, claims=1.0), resident(B, claims=4.0)]
    assert look(settled, slots(residents, [parked(C, claims=7.0), parked(D, claims=5.0)])) == [B, C]


def test_an_adapter_that_could_not_start_takes_no_place():
    settled = Settled()
    seen = slots([], [newcomer(A, claims=9.0), newcomer(B)], unable=frozenset({A}))
    assert look(settled, seen) == [B]


def crowd(number: int, **fields) -> list:
    return [parked(AdapterId(100 + one), claims=0.1, **fields) for one in range(number)]


def test_a_weight_scales_the_claim_in_a_crowd():
    settled = settled_with(A)
    heavy = parked(B, claims=1.0, weight=2.0)
    assert look(settled, slots([resident(A, claims=1.0)], [heavy, *crowd(LOOK_AHEAD)])) == [B]


def test_in_a_crowd_the_oldest_and_the_largest_are_looked_at():
    others = [newcomer(AdapterId(100 + one), since=10.0, claims=0.1) for one in range(2 * LOOK_AHEAD)]
    old = newcomer(A, since=1.0, claims=5.0)
    large = newcomer(B, since=20.0, claims=4.0, running=3)
    settled = Settled()

    assert look(settled, slots([], [*others, old, large], open=2)) == [A, B]
    assert len(settled.next) <= 2 * LOOK_AHEAD


def test_when_slots_close_the_smallest_claims_are_settled_no_longer_and_come_next():
    settled = settled_with(A, B, C)
    residents = [resident(A, claims=1.0), resident(B, claims=4.0), resident(C, claims=2.0)]
    settled.observe(slots(residents, [parked(D, claims=1.5)], open=1), NOW)

    assert (sorted(settled), settled.next) == ([B], [C, D, A])
    settled.observe(slots(residents, [parked(D, claims=1.5)], open=3), NOW)
    assert sorted(settled) == [B, C, D]
