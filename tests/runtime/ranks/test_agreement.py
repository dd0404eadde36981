from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.core.ids import AdapterId, Slot
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import Load, StepPlan
from rota.runtime.ranks.lead import Agreement
from tests.builders import add_adapter

ONE, TWO = AdapterId(1), AdapterId(2)


def agreement_of(ranks: int) -> tuple[Agreement, list[Message]]:
    agreement, posted = Agreement(range(ranks)), []
    agreement.listen(posted.append)
    return agreement, posted


def fetch(*numbers: int) -> StepPlan:
    return StepPlan(step_id=0, fetches=tuple(add_adapter(number).adapter for number in numbers))


def load(*numbers: int) -> StepPlan:
    return StepPlan(step_id=0, loads=tuple(Load(adapter_id=AdapterId(number), slot=Slot(0)) for number in numbers))


def test_an_adapter_is_fetched_when_every_rank_has_said_so():
    agreement, posted = agreement_of(3)
    agreement.order(fetch(1, 2))

    agreement.note(2, AdapterFetched(adapter_id=ONE, at=3.0))
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=4.0))
    agreement.note(0, AdapterFetched(adapter_id=TWO, at=5.0))
    assert posted == []
    agreement.note(1, AdapterFetched(adapter_id=ONE, at=6.0))

    assert posted == [AdapterFetched(adapter_id=ONE, at=6.0)]


def test_an_adapter_takes_as_many_pages_as_the_rank_that_needs_most():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))
    agreement.note(1, AdapterFetched(adapter_id=ONE, at=4.0, pages=1, seals=("second",)))
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=3.0, pages=2, seals=("first",)))

    assert posted == [AdapterFetched(adapter_id=ONE, at=4.0, pages=2, seals=("first", "second"))]


def test_a_copy_is_complete_with_the_last_rank_and_took_as_long_as_the_longest():
    agreement, posted = agreement_of(3)
    agreement.order(load(1))

    agreement.note(1, AdapterReady(ONE, 1.0, copy_s=0.4))
    agreement.note(0, AdapterReady(ONE, 2.0, copy_s=0.1))
    assert posted == []
    agreement.note(2, AdapterReady(ONE, 3.0, copy_s=0.2))

    assert posted == [AdapterReady(ONE, 3.0, copy_s=0.4)]


def test_a_rank_that_cannot_read_fails_the_adapter_for_all_and_the_next_plan_drops_what_others_have_read():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))

    agreement.note(1, AdapterFailed(adapter_id=ONE, at=1.0, reason="The disk is broken."))
    assert posted == []
    agreement.note(0, AdapterFetched(adapter_id=ONE, at=2.0))

    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="Rank 1: The disk is broken.")]
    again = agreement.order(fetch(1))
    assert (again.drops, again.fetches) == ((ONE,), fetch(1).fetches)
    assert agreement.order(fetch(2)).drops == ()


def test_an_adapter_that_no_rank_can_read_has_rank_0s_reason_and_nothing_to_drop():
    agreement, posted = agreement_of(2)
    agreement.order(fetch(1))
    for rank in (1, 0):
        agreement.note(rank, AdapterFailed(adapter_id=ONE, at=1.0, reason="There is no such folder."))

    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="There is no such folder.")]
    assert agreement.order(load(2)).drops == ()


def test_a_copy_that_failed_is_told_at_once_and_only_once():
    agreement, posted = agreement_of(3)
    agreement.order(load(1))

    agreement.note(2, AdapterFailed(adapter_id=ONE, at=1.0, reason="No memory."))
    assert posted == [AdapterFailed(adapter_id=ONE, at=1.0, reason="Rank 2: No memory.")]
    agreement.note(0, AdapterFailed(adapter_id=ONE, at=2.0, reason="No memory."))
    agreement.note(1, AdapterReady(ONE, 3.0))

    assert len(posted) == 1
    agreement.order(load(1))
    for rank in range(3):
        agreement.note(rank, AdapterReady(ONE, 4.0))
    assert posted[1:] == [AdapterReady(ONE, 4.0)]


def test_a_rank_that_is_ahead_counts_for_the_order_after():
    agreement, posted = agreement_of(2)
    for _ in range(2):
        agreement.order(load(1))

    agreement.note(0, AdapterReady(ONE, 1.0))
    agreement.note(0, AdapterReady(ONE, 2.0))
    agreement.note(1, AdapterReady(ONE, 3.0))
    assert len(posted) == 1
    agreement.note(1, AdapterReady(ONE, 4.0))
    assert len(posted) == 2


def test_what_nobody_ordered_is_not_told():
    agreement, posted = agreement_of(1)
    agreement.note(0, AdapterReady(ONE, 1.0))
    assert posted == []


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=6), st.data())
def test_in_any_order_of_words_each_read_ends_in_one_message_of_all_ranks(ranks, successes, data):
    """One adapter is read again and again; each rank reports in order, and ranks are interleaved at will."""
    agreement, posted = agreement_of(ranks)
    for _ in successes:
        agreement.order(fetch(1))
    outcomes = {rank: data.draw(st.permutations(successes)) for rank in range(ranks)}
    said: dict[int, int] = defaultdict(int)
    turns = data.draw(st.permutations([rank for rank in range(ranks) for _ in successes]))
    for rank in turns:
        is_good = outcomes[rank][said[rank]]
        said[rank] += 1
        agreement.note(
            rank,
            AdapterFetched(adapter_id=ONE, at=1.0) if is_good else AdapterFailed(adapter_id=ONE, at=1.0, reason="bad"),
        )
        assert len(posted) == min(said[rank] for rank in range(ranks))

    expected = [all(outcomes[rank][at] for rank in range(ranks)) for at in range(len(successes))]
    assert [isinstance(message, AdapterFetched) for message in posted] == expected


def test_a_device_that_says_anything_else_is_a_bug():
    agreement, _ = agreement_of(1)
    with pytest.raises(AssertionError):
        agreement.note(0, object())  # type: ignore[arg-type]
