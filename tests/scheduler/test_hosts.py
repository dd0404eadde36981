from __future__ import annotations

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.scheduler.hosts import ALONE_S, HostLedger


def an_adapter(number: int, is_read_alone: bool = False) -> Adapter:
    return Adapter(adapter_id=AdapterId(number), name=str(number), path="/", is_read_alone=is_read_alone)


def hosts(most: int, *held: int) -> HostLedger:
    ledger = HostLedger(most)
    for adapter_id in held:
        ledger.begin_fetch(an_adapter(adapter_id), 0.0)
        ledger.finish_fetch(adapter_id)
    return ledger


def test_what_is_on_its_way_takes_room_and_is_not_there_yet():
    ledger = hosts(2, 1)
    assert not ledger.is_full
    ledger.begin_fetch(an_adapter(2), 0.0)
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
    ledger.begin_fetch(an_adapter(2), 0.0)
    ledger.forget(1)
    ledger.forget(2)

    assert not ledger.has(1)
    assert not ledger.is_fetching(2)
    assert not ledger.is_full


def test_one_that_is_read_alone_waits_for_the_others_and_they_wait_for_it():
    ledger, doubted, other = hosts(4, 1), an_adapter(2, is_read_alone=True), an_adapter(3)
    ledger.begin_fetch(other, 0.0)
    assert ledger.lets_read(an_adapter(4), 0.0)
    assert not ledger.lets_read(doubted, 0.0)
    assert not ledger.lets_read(an_adapter(4), 0.0), "or its turn would never come"
    ledger.begin_pass()
    assert ledger.lets_read(an_adapter(4), 0.0), "nobody asks for it any more"
    ledger.finish_fetch(3)
    assert ledger.lets_read(doubted, 0.0)
    ledger.begin_fetch(doubted, 0.0)
    assert not ledger.lets_read(an_adapter(4), 0.0)
    ledger.forget(2)
    assert ledger.lets_read(an_adapter(4), 0.0)


def test_one_that_is_read_alone_and_takes_long_keeps_the_others_waiting_for_a_while_only():
    ledger, doubted, next_one = hosts(4), an_adapter(1, is_read_alone=True), an_adapter(2, is_read_alone=True)
    ledger.begin_fetch(doubted, 5.0)
    assert not ledger.lets_read(an_adapter(3), 5.0 + ALONE_S - 0.1)
    assert not ledger.lets_read(next_one, 5.0 + ALONE_S)
    assert ledger.lets_read(an_adapter(3), 5.0 + ALONE_S)
