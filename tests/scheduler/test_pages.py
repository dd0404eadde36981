from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.ids import AdapterId
from rota.policy.eviction import Eviction
from rota.scheduler.slots import PageLedger, SlotLedger
from tests.counting import calls_in
from tests.scheduler.balance import check_pages, check_slots


def known(pages: int, slots: int, *sizes: int) -> PageLedger:
    """Adapters of these sizes, numbered from 1."""
    ledger = PageLedger(pages, slots)
    for number, size in enumerate(sizes, start=1):
        ledger.know(AdapterId(number), size)
    return ledger


def slots_of(pages: int, slots: int, *sizes: int) -> SlotLedger:
    ledger = SlotLedger(slots, Eviction("lru"), pages)
    for number, size in enumerate(sizes, start=1):
        ledger.know(AdapterId(number), size)
    return ledger


def open_by_a_plain_model(pages: int, slots: int, sizes: list[int]) -> int:
    largest = sorted(sizes, reverse=True)
    return max(k for k in range(slots + 1) if sum(largest[:k]) <= pages)


@pytest.mark.parametrize(
    ("pages", "slots", "sizes", "is_open"),
    [
        (8, 4, (), 4),
        (8, 4, (8,), 4),  # alone it fits, and nobody else is known
        (8, 4, (8, 1), 1),
        (8, 4, (2, 2, 2, 2), 4),
        (8, 4, (2, 2, 2, 2, 2), 4),  # never more than slots
        (8, 4, (3, 2, 2, 2), 3),
        (8, 4, (3, 3, 1, 1), 4),
        (8, 4, (3, 3, 3, 1), 2),
        (8, 4, (1, 1, 5, 1), 4),
        (8, 4, (1, 6, 1, 1), 3),
        (132, 104, (1,) * 100 + (8,) * 4, 104),  # decision 0021's example: each has its place
        (131, 104, (1,) * 100 + (8,) * 4, 103),
    ],
)
def test_as_many_slots_are_open_as_the_largest_adapters_fill_together(pages, slots, sizes, is_open):
    ledger = known(pages, slots, *sizes)

    assert ledger.least == is_open == open_by_a_plain_model(pages, slots, [*sizes])
    assert ledger.open == slots, "nobody wants one"
    for number in range(1, len(sizes) + 1):
        ledger.note(AdapterId(number), is_there=True)
    assert ledger.open == is_open
    check_pages(ledger, {})


def test_slots_close_when_a_large_adapter_comes_and_open_when_it_is_gone():
    ledger = known(8, 4, 2, 2, 2, 2)
    for number in (1, 2, 3):
        ledger.note(AdapterId(number), is_there=True)
    assert ledger.least_with(AdapterId(9), 6) == 2
    assert ledger.least == 4, "a question changes nothing"

    ledger.know(AdapterId(9), 6)
    assert (ledger.least, ledger.open) == (2, 4), "it is known, and wants no slot"
    ledger.note(AdapterId(9), is_there=True)
    assert ledger.open == 2
    ledger.know(AdapterId(9), 2)  # its folder was written anew
    assert ledger.open == 4
    ledger.know(AdapterId(9), 7)
    assert ledger.open == 1
    ledger.note(AdapterId(9), is_there=False)
    assert (ledger.least, ledger.open) == (1, 4)
    ledger.forget(AdapterId(9))
    ledger.forget(AdapterId(9))
    assert (ledger.least, ledger.open) == (4, 4)
    check_pages(ledger, {})


def test_an_adapter_that_needs_more_than_all_pages_would_leave_no_slot_open():
    assert known(8, 4).least_with(AdapterId(1), 9) == 0


changes = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 10), st.booleans()), max_size=40)


@settings(max_examples=80, deadline=None)
@given(changes, st.integers(1, 30), st.integers(1, 8))
def test_the_open_slots_are_right_whatever_becomes_known_comes_leaves_and_is_forgotten(changes, pages, slots):
    ledger, sizes, there = PageLedger(pages, slots), {}, set()
    for number, size, is_there in changes:  # a size of 0 stands for an adapter that is gone
        if size:
            sizes[number] = size
            assert ledger.least_with(number, size) == open_by_a_plain_model(pages, slots, [*sizes.values()])
            ledger.know(number, size)
            ledger.note(number, is_there)
            (there.add if is_there else there.discard)(number)
        else:
            sizes.pop(number, None)
            there.discard(number)
            ledger.forget(number)
        assert ledger.least == open_by_a_plain_model(pages, slots, [*sizes.values()])
        assert ledger.open == open_by_a_plain_model(pages, slots, [sizes[one] for one in there]) >= ledger.least
        check_pages(ledger, {})


def test_one_more_adapter_costs_no_more_among_ten_thousand():
    few, many = known(64, 8, *(1, 2, 4, 8) * 10), known(64, 8, *(1, 2, 4, 8) * 2500)
    cost_of_few, _ = calls_in(lambda: few.know(AdapterId(0), 4))
    cost_of_many, _ = calls_in(lambda: many.know(AdapterId(0), 4))

    assert cost_of_many == cost_of_few


def test_an_adapter_gets_as_many_pages_as_it_takes_and_gives_them_back():
    ledger = slots_of(8, 4, 3, 1, 2)
    first, second = ledger.begin_load(AdapterId(1)), ledger.begin_load(AdapterId(2))
    assert (first.slot, first.pages) == (0, (0, 1, 2))
    assert (second.slot, second.pages) == (1, (3,))
    assert ledger.pages.used == 4
    check_slots(ledger)

    ledger.vacate(AdapterId(1))
    assert ledger.pages.used == 1
    assert ledger.begin_load(AdapterId(3)).pages == (0, 1), "the lowest first, so that a rerun takes the same"
    assert ledger.begin_load(AdapterId(1)).pages == (2, 4, 5), "they need not lie side by side"
    check_slots(ledger)


def test_no_adapter_comes_while_more_reside_than_slots_are_open():
    ledger = slots_of(8, 4, 2, 2, 2, 2)
    for number in (1, 2, 3):
        ledger.begin_load(AdapterId(number))
    assert (ledger.total, ledger.empty, ledger.surplus) == (4, 1, 0)

    ledger.know(AdapterId(9), 6)
    assert (ledger.total, ledger.empty, ledger.surplus) == (4, 1, 0)
    ledger.want(AdapterId(9))
    assert (ledger.total, ledger.empty, ledger.surplus) == (2, 0, 1)
    ledger.vacate(AdapterId(1))
    assert (ledger.empty, ledger.surplus) == (0, 0)
    with pytest.raises(AssertionError, match="no slot is empty"):
        ledger.begin_load(AdapterId(9))
    ledger.vacate(AdapterId(2))
    assert ledger.begin_load(AdapterId(9)).pages == (0, 1, 2, 3, 6, 7)
    check_slots(ledger)

    ledger.vacate(AdapterId(9))
    ledger.forget(AdapterId(9))
    assert (ledger.total, ledger.empty, ledger.surplus) == (4, 3, 0)


def test_without_pages_sizes_change_nothing():
    ledger = SlotLedger(2, Eviction("lru"))
    ledger.know(AdapterId(1), 5)

    assert ledger.begin_load(AdapterId(1)).pages == ()
    assert (ledger.total, ledger.empty, ledger.pages) == (2, 1, None)


def test_places_for_matrices_close_slots_as_pages_do():
    ledger = SlotLedger(4, Eviction("lru"), pages=8, matrices=2)
    for number, matrices in ((1, 0), (2, 1), (3, 1)):
        ledger.know(AdapterId(number), 1, matrices)
    assert ledger.total == 4, "both matrices fit, whoever else comes"
    assert [ledger.begin_load(AdapterId(number)).matrices for number in (1, 2, 3)] == [(), (0,), (1,)]
    ledger.know(AdapterId(4), 1, 2)
    ledger.want(AdapterId(4))
    assert (ledger.total, ledger.empty, ledger.surplus) == (1, 0, 2)
    for number in (1, 2, 3):
        ledger.vacate(AdapterId(number))
    assert ledger.begin_load(AdapterId(4)).matrices == (0, 1)
    check_slots(ledger)
    ledger.vacate(AdapterId(4))
    ledger.forget(AdapterId(4))
    assert ledger.total == 4
    check_slots(ledger)


def test_a_lost_page_does_not_go_unnoticed():
    ledger = slots_of(8, 4, 3)
    ledger.begin_load(AdapterId(1)).pages = (0, 1)
    with pytest.raises(AssertionError, match="a page is lost or shared"):
        check_slots(ledger)
    ledger.pages.give_back((2,))
    with pytest.raises(AssertionError, match="an adapter lacks a page"):
        check_slots(ledger)
