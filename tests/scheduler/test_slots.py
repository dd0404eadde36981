from __future__ import annotations

import pytest

from rota.core.config import LANDINGS
from rota.policy.eviction import eviction
from rota.scheduler.slots import SlotLedger


def slots(total: int, *ready: int, policy: str = "lru") -> SlotLedger:
    ledger = SlotLedger(total, eviction(policy))
    for adapter_id in ready:
        ledger.begin_load(adapter_id)
        ledger.finish_load(adapter_id)
    return ledger


def test_an_adapter_goes_from_nowhere_through_loading_to_ready_and_out_again():
    ledger = slots(2)
    assert ledger.empty == 2

    slot = ledger.begin_load(1)
    assert not ledger.residencies[1].is_ready
    assert ledger.empty == 1
    assert ledger.finish_load(1) is None
    assert ledger.residencies[1].is_ready

    assert ledger.vacate(1) == slot
    assert 1 not in ledger.residencies
    assert ledger.empty == 2
    ledger.check()


def test_the_lowest_empty_slot_is_taken_first_so_that_a_rerun_takes_the_same():
    ledger = slots(3, 1, 2, 3)
    second = ledger.residencies[2].slot
    ledger.vacate(3)
    ledger.vacate(2)

    assert ledger.begin_load(9) == second


def test_an_adapter_lands_beside_the_one_it_replaces_and_they_change_places_when_it_is_there():
    ledger = slots(1, 1)
    assert ledger.empty == 0
    landing = ledger.begin_load(2, replaces=1)
    ledger.check()

    assert landing != ledger.residencies[1].slot
    assert ledger.is_replaced(1)
    assert ledger.empty == 0
    assert not ledger.landings

    assert ledger.finish_load(2) == 1
    ledger.vacate(1)
    assert not ledger.is_replaced(1)
    assert ledger.empty == 0
    assert ledger.landings
    ledger.check()


def test_when_the_one_to_be_replaced_leaves_by_itself_nobody_else_has_to():
    ledger = slots(1, 1)
    ledger.begin_load(2, replaces=1)
    ledger.vacate(1)
    ledger.check()

    assert ledger.finish_load(2) is None
    assert ledger.empty == 0


def test_one_that_lands_for_nobody_may_leave_instead_of_the_present_one():
    ledger = slots(1, 1)
    ledger.begin_load(2, replaces=1)
    assert ledger.finish_load(2) == 1
    ledger.vacate(2)
    ledger.check()

    assert not ledger.is_replaced(1)
    assert ledger.empty == 0


def test_when_the_one_on_its_way_is_lost_the_present_one_stays():
    ledger = slots(1, 1)
    ledger.begin_load(2, replaces=1)
    ledger.vacate(2)
    ledger.check()

    assert not ledger.is_replaced(1)
    assert ledger.residencies.keys() == {1}
    assert ledger.landings


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
        ledger.check()


def test_there_are_as_many_places_as_slots_and_landings():
    ledger = slots(2, 1, 2)
    ledger.begin_load(3, replaces=1)
    assert {residency.slot for residency in ledger.residencies.values()} == set(range(2 + LANDINGS))
