from __future__ import annotations

from rota.scheduler.hosts import HostLedger


def hosts(most: int, *held: int) -> HostLedger:
    ledger = HostLedger(most)
    for adapter_id in held:
        ledger.begin_fetch(adapter_id)
        ledger.finish_fetch(adapter_id)
    return ledger


def test_what_is_on_its_way_takes_room_and_is_not_there_yet():
    ledger = hosts(2, 1)
    assert not ledger.is_full
    ledger.begin_fetch(2)
    assert ledger.is_full
    assert ledger.known == 2
    assert ledger.is_fetching(2)
    assert not ledger.has(2)

    ledger.finish_fetch(2)
    assert ledger.has(2)
    assert not ledger.is_fetching(2)
    assert ledger.is_full


def test_the_one_unused_for_longest_goes_first():
    ledger = hosts(3, 1, 2, 3)
    ledger.use(1)
    assert ledger.cheapest(lambda _: 0) == 2


def test_the_cheapest_to_lose_goes_before_the_longest_unused():
    assert hosts(3, 1, 2, 3).cheapest({1: 2, 2: 1, 3: 1}.get) == 2


def test_one_that_must_stay_stays():
    assert hosts(2, 1, 2).cheapest({1: None, 2: 5}.get) == 2
    assert hosts(2, 1, 2).cheapest(lambda _: None) is None


def test_one_that_could_not_be_read_or_was_removed_leaves_room():
    ledger = hosts(2, 1)
    ledger.begin_fetch(2)
    ledger.forget(1)
    ledger.forget(2)

    assert not ledger.has(1)
    assert not ledger.is_fetching(2)
    assert not ledger.is_full
