from __future__ import annotations

import math

import pytest

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId, Row
from rota.core.tenant import SOLE_TENANT
from rota.scheduler.accounts import Account
from rota.scheduler.adapter_state import AnswerLengths, Group
from rota.scheduler.sequence import Phase, Sequence
from rota.scheduler.state import Absent, DueQueue
from tests.builders import request


def group(number: int) -> Group:
    return Group(Adapter(adapter_id=AdapterId(number), name=f"adapter{number}", path=""), AnswerLengths())


def numbers(queue: DueQueue) -> list[int]:
    return [one.adapter_id for one in queue]


@pytest.mark.parametrize(
    ("computing", "parked", "answering", "waiting", "due_at"),
    [
        ([3.0, 1.0], [], [], [], 1.0),
        ([3.0], [2.0], [], [], 2.0),
        ([3.0], [], [1.0], [], 3.0),  # this one has its first token
        ([3.0], [], [], [4.0, 2.0], 2.0),
        ([], [], [1.0], [], math.inf),
    ],
)
def test_a_first_token_is_due_to_the_oldest_request_that_has_none(computing, parked, answering, waiting, due_at):
    one, account = group(1), Account(SOLE_TENANT)
    for at in (*computing, *parked, *answering, *waiting):
        one.enter(account)
        made = Sequence(request(f"r{at}", adapter=AdapterId(1), arrived_at=at), 10, account)
        if at in waiting:
            one.queue.push(made)
            continue
        made.tokens.extend([7] * (at in answering))
        made.row = Row(0)
        one.join(made, Phase.DECODE if at in answering else Phase.PREFILL)
        if at in parked:
            one.lose_row(made)

    assert one.first_token_due_at == due_at


def test_an_adapter_is_as_urgent_as_the_most_urgent_that_runs_or_the_first_that_waits():
    one, account = group(1), Account(SOLE_TENANT)
    assert one.priority == 0
    found = []
    for number, (priority, phase) in enumerate([(-1, None), (-2, Phase.DECODE), (3, Phase.PREFILL), (9, None)]):
        made = Sequence(request(f"r{number}", adapter=AdapterId(1), priority=priority), 10, account)
        made.row = Row(number)
        one.enter(account)
        one.join(made, phase) if phase else one.queue.push(made)
        found.append(one.priority)

    assert found == [-1, -1, 3, 9], "priority is a head start, so the most urgent of those that wait is the first"


def test_absent_adapters_are_in_every_order_that_they_belong_to():
    absent, account, few, many = Absent(), Account(SOLE_TENANT), group(1), group(2)
    for one, arrivals in ((few, [1.0]), (many, [2.0, 3.0])):
        for at in arrivals:
            one.enter(account)
            one.queue.push(Sequence(request(f"r{at}", adapter=one.adapter_id, arrived_at=at), 10, account))
    absent.put(few, due_at=9.0, is_at_hand=True, is_missing=False)
    absent.put(many, due_at=8.0, is_at_hand=False, is_missing=True)

    assert [numbers(order) for order in (absent, absent.oldest, absent.largest)] == [[2, 1], [1, 2], [2, 1]]
    assert [numbers(order) for order in (absent.newcomers, absent.at_hand)] == [[1, 2], [1]]
    assert [numbers(order) for order in (absent.parked, absent.stalest)] == [[], []]
    assert absent.missing == {many.adapter_id}

    absent.remove(many)
    assert not absent.missing
    assert [numbers(order) for order in (absent, absent.oldest, absent.largest, absent.newcomers)] == [[1]] * 4


def test_the_first_due_stands_first_and_ties_go_by_id():
    queue = DueQueue()
    for number, due_at in ((3, 1.0), (2, 1.0), (1, 5.0)):
        queue.place(group(number), due_at)

    assert numbers(queue) == [2, 3, 1]


def test_a_group_that_is_placed_again_moves():
    queue = DueQueue()
    one, two = group(1), group(2)
    queue.place(one, 1.0)
    queue.place(two, 2.0)
    queue.place(one, 3.0)

    assert numbers(queue) == [2, 1]
    assert len(queue) == 2


def test_one_that_leaves_is_gone_and_may_leave_twice():
    queue = DueQueue()
    one = group(1)
    queue.place(one, 1.0)
    queue.remove(one)
    queue.remove(one)

    assert AdapterId(1) not in queue
    assert queue.get(AdapterId(1)) is None
    assert not queue


def test_a_group_is_found_by_its_adapter():
    queue = DueQueue()
    one, two = group(1), group(2)
    queue.place(one, 5.0)
    queue.place(two, 1.0)

    assert queue.get(AdapterId(1)) is one
    assert queue.get(AdapterId(2)) is two


def test_the_queue_may_change_while_it_is_walked():
    queue = DueQueue()
    for number in range(1, 5):
        queue.place(group(number), float(number))

    met = []
    for one in queue:
        met.append(one.adapter_id)
        queue.remove(one)
    assert met == [1, 2, 3, 4]


def test_later_than_gives_the_groups_behind_a_place_whether_or_not_a_group_is_there():
    queue = DueQueue()
    for number, due_at in ((1, 1.0), (2, 2.0), (4, 2.0)):
        queue.place(group(number), due_at)

    assert [one.adapter_id for one in queue.later_than(2.0, AdapterId(3))] == [4]
    assert [one.adapter_id for one in queue.later_than(1.0, AdapterId(1))] == [2, 4]


def test_the_groups_that_are_due_last_can_be_asked_for_alone():
    queue = DueQueue()
    for number, due_at in ((1, 1.0), (2, 3.0), (3, 2.0)):
        queue.place(group(number), due_at)

    assert [one.adapter_id for one in queue.last(2)] == [2, 3]
    assert [one.adapter_id for one in queue.last(9)] == [2, 3, 1]
