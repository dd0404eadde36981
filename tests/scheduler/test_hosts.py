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


def test_the_one_unused_for_longest_comes_first():
    ledger = hosts(3, 1, 2, 3)
    ledger.use(1)
    assert [*ledger.held] == [2, 3, 1]


def test_one_that_could_not_be_read_or_was_removed_leaves_room():
    ledger = hosts(2, 1)
    ledger.begin_fetch(2)
    ledger.forget(1)
    ledger.forget(2)

    assert not ledger.has(1)
    assert not ledger.is_fetching(2)
    assert not ledger.is_full
