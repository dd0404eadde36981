from __future__ import annotations

from rota.core.adapter import Adapter
from rota.core.ids import AdapterId
from rota.scheduler.group import Group
from rota.scheduler.lineup import Lineup


def group(number: int) -> Group:
    return Group(Adapter(AdapterId(number), f"adapter{number}", ""))


def numbers(lineup: Lineup) -> list[int]:
    return [one.adapter_id for one in lineup]


def test_the_first_due_stands_first_and_ties_go_by_id():
    lineup = Lineup()
    for number, due_at in ((3, 1.0), (2, 1.0), (1, 5.0)):
        lineup.place(group(number), due_at)

    assert numbers(lineup) == [2, 3, 1]


def test_a_group_that_is_placed_again_moves():
    lineup = Lineup()
    one, two = group(1), group(2)
    lineup.place(one, 1.0)
    lineup.place(two, 2.0)
    lineup.place(one, 3.0)

    assert numbers(lineup) == [2, 1]
    assert len(lineup) == 2


def test_one_that_leaves_is_gone_and_may_leave_twice():
    lineup = Lineup()
    one = group(1)
    lineup.place(one, 1.0)
    lineup.remove(one)
    lineup.remove(one)

    assert AdapterId(1) not in lineup
    assert not lineup


def test_whoever_walks_the_line_may_change_it():
    lineup = Lineup()
    for number in range(1, 5):
        lineup.place(group(number), float(number))

    met = []
    for one in lineup:
        met.append(one.adapter_id)
        lineup.remove(one)
    assert met == [1, 2, 3, 4]


def test_later_than_gives_those_behind_a_place_whoever_stands_there():
    lineup = Lineup()
    for number, due_at in ((1, 1.0), (2, 2.0), (4, 2.0)):
        lineup.place(group(number), due_at)

    assert [one.adapter_id for one in lineup.later_than(2.0, AdapterId(3))] == [4]
    assert [one.adapter_id for one in lineup.later_than(1.0, AdapterId(1))] == [2, 4]


def test_of_those_behind_a_place_some_can_be_asked_for_alone():
    lineup = Lineup()
    for number, due_at in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 2.0), (5, 4.0)):
        lineup.place(group(number), due_at)

    some = [AdapterId(number) for number in (9, 5, 4, 3, 1)]
    assert [one.adapter_id for one in lineup.later_among(some, 2.0, AdapterId(3))] == [4, 5]
