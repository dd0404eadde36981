from __future__ import annotations

import gc
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from rota.core.tenant import SOLE_TENANT
from rota.scheduler.accounts import Account
from rota.scheduler.lazy_heap import LazyHeap
from rota.scheduler.sequence import Sequence
from tests.builders import request


def sequence(id: str, arrived_at: float) -> Sequence:
    return Sequence(request(id, arrived_at=arrived_at), limit=10, account=Account(SOLE_TENANT))


def put(queue: LazyHeap[Sequence], one: Sequence) -> None:
    queue.put(one, one.arrival)


def test_the_first_is_who_arrived_first_and_then_by_id():
    queue = LazyHeap()
    for id, arrived_at in (("b", 1.0), ("a", 1.0), ("c", 0.5)):
        put(queue, sequence(id, arrived_at))

    served = []
    while first := queue.first():
        served.append(first.request_id)
        queue.remove(first)
    assert served == ["c", "a", "b"]


def test_one_that_comes_back_keeps_its_place():
    queue = LazyHeap()
    early, late = sequence("early", 0.0), sequence("late", 1.0)
    put(queue, early)
    put(queue, late)
    queue.remove(early)
    put(queue, early)

    assert queue.first() is early
    queue.remove(early)
    assert queue.first() is late
    assert len(queue) == 1


def test_one_that_leaves_from_the_middle_is_not_met_again():
    queue = LazyHeap()
    first, middle, last = (sequence(id, at) for at, id in enumerate("abc"))
    for one in (first, middle, last):
        put(queue, one)
    queue.remove(middle)
    queue.remove(first)

    assert queue.first() is last
    assert list(queue) == [last]


# A place that was left lies behind the first key, and comes to the top when that key is taken.
@example([("put", 0, 0), ("put", 1, 1), ("put", 1, 3), ("put", 2, 2), ("take", 0, 0)])
@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove", "take", "give back"]), st.integers(0, 5), st.integers(0, 3)))
)
def test_whoever_comes_moves_leaves_and_is_taken_for_a_while_the_first_is_known(acts):
    queue, here, taken = LazyHeap[int](), dict[int, tuple[int, int]](), list[Any]()
    for number, (act, key, order) in enumerate(acts):
        if act == "put":
            queue.put(key, (order,))
            here[key] = (order, number)
            taken = [one for one in taken if one[0][2] != key]
        elif act == "remove":
            queue.remove(key)
            here.pop(key, None)
        elif act == "take" and here:
            entry = queue.take()
            taken.append((entry, here.pop(entry[2])))
        elif act == "give back" and taken:
            entry, place = taken.pop()
            queue.give_back(entry)
            here[entry[2]] = place

        assert queue.first() == min(here, key=here.__getitem__, default=None)
        assert (len(queue), {*queue}) == (len(here), {*here})
        assert all(queue.order_of(key) == (place[0],) for key, place in here.items())


def test_those_who_leave_behind_one_who_stays_are_let_go():
    queue = LazyHeap()
    put(queue, sequence("stays", 0.0))
    for number in range(1000):
        leaver = sequence(f"leaver{number}", 1.0)
        put(queue, leaver)
        queue.remove(leaver)

    kept = [one for one in gc.get_objects() if isinstance(one, Sequence) and one.request_id.startswith("leaver")]
    assert len(kept) < 100
    assert [one.request_id for one in queue] == ["stays"]
