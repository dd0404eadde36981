from __future__ import annotations

import pytest

from rota.policy.eviction import Eviction
from rota.scheduler.slots import SlotLedger
from tests.scheduler.balance import check_slots


def slots(total: int, *ready: int, policy: str = "lru") -> SlotLedger:
    ledger = SlotLedger(total, Eviction(policy))
    for adapter_id in ready:
        ledger.begin_load(adapter_id)
        ledger.finish_load(adapter_id)
    return ledger


def test_an_adapter_goes_from_nowhere_through_loading_to_ready_and_out_again():
    ledger = slots(2)
    assert ledger.empty == 2

    slot = ledger.begin_load(1).slot
    assert not ledger.residencies[1].is_ready
    assert ledger.empty == 1
    ledger.finish_load(1)
    assert ledger.residencies[1].is_ready

    assert ledger.vacate(1) == slot
    assert 1 not in ledger.residencies
    assert ledger.empty == 2
    check_slots(ledger)


def test_adapters_are_surplus_only_when_they_are_more_than_open_slots():
    ledger = SlotLedger(3, Eviction("lru"), pages=6)
    for adapter_id in (1, 2, 3):
        ledger.know(adapter_id, pages=2)
    for adapter_id in (1, 2, 3):
        ledger.begin_load(adapter_id)
        assert (ledger.surplus, ledger.empty) == (0, 3 - adapter_id)

    ledger.know(4, pages=4)
    assert (ledger.total, ledger.surplus, ledger.empty) == (3, 0, 0)
    ledger.want(4)
    assert (ledger.total, ledger.surplus, ledger.empty) == (2, 1, 0), "four pages and two"


def test_the_lowest_empty_slot_is_taken_first_so_that_a_rerun_takes_the_same():
    ledger = slots(3, 1, 2, 3)
    second = ledger.residencies[2].slot
    ledger.vacate(3)
    ledger.vacate(2)

    assert ledger.begin_load(9).slot == second


def test_an_adapter_is_copied_to_where_another_one_left():
    ledger = slots(1, 1)
    assert ledger.empty == 0
    place = ledger.vacate(1)

    assert ledger.begin_load(2).slot == place
    assert ledger.empty == 0
    check_slots(ledger)


def test_copies_under_way_are_known_in_the_order_in_which_they_were_ordered():
    ledger = slots(4, 1)
    for adapter_id in (4, 2, 3):
        ledger.begin_load(adapter_id)
    assert ledger.on_their_way == [4, 2, 3]

    ledger.finish_load(2)
    ledger.vacate(4)
    assert ledger.on_their_way == [3]


@pytest.mark.parametrize(("policy", "first"), [("lru", 2), ("fifo", 1)])
def test_who_leaves_first_is_asked_of_the_eviction_policy(policy, first):
    ledger = slots(3, 1, 2, 3, policy=policy)
    ledger.use(1)

    assert ledger.first_to_leave([1, 2, 3]) == first
    assert ledger.first_to_leave([3]) == 3


def test_one_that_comes_back_is_new_to_the_eviction_policy():
    ledger = slots(2, 1, 2, policy="fifo")
    ledger.vacate(1)
    ledger.begin_load(1)

    assert ledger.first_to_leave([1, 2]) == 2


def test_a_lost_slot_does_not_go_unnoticed():
    ledger = slots(2, 1)
    del ledger.residencies[1]
    with pytest.raises(AssertionError, match="lost or shared"):
        check_slots(ledger)


def test_there_are_as_many_places_as_slots():
    ledger = slots(2, 1, 2)
    assert {residency.slot for residency in ledger.residencies.values()} == {0, 1}
    with pytest.raises(AssertionError, match="no slot is empty"):
        ledger.begin_load(3)
