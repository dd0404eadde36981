from __future__ import annotations

from rota.core.ids import BASE, AdapterId
from rota.scheduler.blocks import BlockLedger, first_key, next_key
from tests.scheduler.balance import check_blocks

FRENCH = AdapterId(1)


def chain(adapter: AdapterId, *blocks: tuple[int, ...]) -> list[bytes]:
    keys = [first_key(adapter)]
    for tokens in blocks:
        keys.append(next_key(keys[-1], tokens))
    return keys[1:]


def test_a_released_block_is_found_again_by_its_name():
    ledger = BlockLedger(blocks=4, block_size=2)
    keys = chain(BASE, (1, 2), (3, 4))
    held = ledger.allocate(2)
    for block, key in zip(held, keys, strict=True):
        ledger.publish(block, key)
    ledger.release(held)

    assert ledger.free == 4
    assert ledger.find(keys) == held


def test_the_search_stops_at_the_first_block_that_is_missing():
    ledger = BlockLedger(blocks=4, block_size=2)
    keys = chain(BASE, (1, 2), (3, 4), (5, 6))
    first, third = ledger.allocate(2)
    ledger.publish(first, keys[0])
    ledger.publish(third, keys[2])

    assert ledger.find(keys) == [first]


def test_a_name_depends_on_everything_before_it_and_on_the_adapter():
    names = {chain(BASE, (1, 2), (5, 6))[1], chain(BASE, (3, 4), (5, 6))[1], chain(FRENCH, (1, 2), (5, 6))[1]}

    assert len(names) == 3


def test_blank_blocks_go_before_named_ones_and_the_longest_unused_first():
    ledger = BlockLedger(blocks=3, block_size=2)
    keys = chain(BASE, (1, 2), (3, 4))
    early, late = ledger.allocate_one(), ledger.allocate_one()
    ledger.publish(early, keys[0])
    ledger.publish(late, keys[1])
    ledger.release([early])
    ledger.release([late])

    blank = ledger.allocate_one()
    assert blank not in (early, late)
    assert ledger.allocate(2) == [early, late]
    assert ledger.find(keys) == []


def test_the_end_of_a_text_is_forgotten_before_its_beginning():
    ledger = BlockLedger(blocks=2, block_size=2)
    keys = chain(BASE, (1, 2), (3, 4))
    held = ledger.allocate(2)
    for block, key in zip(held, keys, strict=True):
        ledger.publish(block, key)
    ledger.release(held)

    ledger.allocate_one()
    assert ledger.find(keys) == held[:1]


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    ledger = BlockLedger(blocks=2, block_size=2)
    held = ledger.allocate(1)
    ledger.publish(held[0], chain(BASE, (1, 2))[0])
    ledger.hold(held)

    ledger.release(held)
    assert ledger.free == 1
    ledger.release(held)
    assert ledger.free == 2


def test_found_blocks_cost_nothing_while_somebody_holds_them():
    ledger = BlockLedger(blocks=4, block_size=2)
    held, unheld = ledger.allocate_one(), ledger.allocate_one()
    ledger.publish(unheld, chain(BASE, (1, 2))[0])
    ledger.release([unheld])

    assert ledger.cost_of([held, unheld], blocks=3) == 2


def test_two_writers_of_the_same_text_keep_their_own_blocks_and_the_first_keeps_the_name():
    ledger = BlockLedger(blocks=2, block_size=2)
    first, second = ledger.allocate(2)
    (key,) = chain(BASE, (1, 2))
    ledger.publish(first, key)
    ledger.publish(second, key)

    assert ledger.find([key]) == [first]
    check_blocks(ledger, [[first], [second]])


def test_forgetting_drops_the_names_and_leaves_the_holders():
    ledger = BlockLedger(blocks=2, block_size=2)
    held = ledger.allocate(1)
    (key,) = chain(BASE, (1, 2))
    ledger.publish(held[0], key)
    ledger.forget()

    assert ledger.find([key]) == []
    check_blocks(ledger, [held])
