from __future__ import annotations

from rota.core.tenant import Tenant
from rota.scheduler.accounts import Account
from rota.scheduler.queues import FairQueue
from rota.scheduler.sequence import Sequence
from tests.builders import request

A, B, C = (Account(Tenant(name=name)) for name in "abc")


def sequence(id: str, account: Account, at: float = 0.0) -> Sequence:
    return Sequence(request(id, arrived_at=at), limit=10, account=account)


def queue_of(*sequences: Sequence) -> FairQueue:
    queue = FairQueue()
    for one in sequences:
        queue.push(one)
    return queue


def test_the_tenant_that_has_got_least_is_next_and_its_first_request_with_it():
    a, b = Account(Tenant(name="a")), Account(Tenant(name="b"))
    queue = queue_of(sequence("a0", a, 1.0), sequence("a1", a, 2.0), sequence("b1", b, 4.0), sequence("b0", b, 3.0))

    a.service_s = 0.5
    assert queue.next().request_id == "b0"
    b.service_s = 0.7
    assert queue.next().request_id == "a0"
    assert queue.first().request_id == "a0", "by arrival, whatever the tenants have got"


def test_with_one_tenant_the_next_is_always_the_first():
    account = Account(Tenant(name="a"))
    queue = queue_of(*(sequence(f"r{number}", account, at=float(number * 7 % 5)) for number in range(5)))

    while queue:
        assert queue.next() is queue.first()
        account.service_s += 1.0
        queue.remove(queue.next())


def test_tenants_come_in_turn_and_the_line_is_as_it_was():
    queue = queue_of(sequence("a0", A), sequence("b0", B), sequence("c0", C))
    A.service_s, B.service_s, C.service_s = 2.0, 3.0, 1.0

    assert [one.request_id for one in queue.in_turn(2)] == ["c0", "a0"]
    assert [one.request_id for one in queue.in_turn(9)] == ["c0", "a0", "b0"]
    assert queue.next().request_id == "c0"


def test_a_tenant_that_left_while_its_place_was_taken_does_not_come_back_with_it():
    a, b = Account(Tenant(name="a")), Account(Tenant(name="b"))
    b.service_s = 1.0
    brief = sequence("a0", a)
    queue = queue_of(brief, sequence("b0", b))
    place = queue.pass_over()
    queue.remove(brief)
    queue.give_back(place)
    assert queue.next().request_id == "b0"


def test_nor_does_one_get_its_old_place_that_has_come_back_to_another():
    a, b = Account(Tenant(name="a")), Account(Tenant(name="b"))
    brief = sequence("a0", a)
    queue = queue_of(brief, sequence("b0", b))
    place = queue.pass_over()
    queue.remove(brief)
    b.service_s = 1.0
    a.service_s = 2.0
    queue.push(sequence("a1", a))
    queue.give_back(place)
    assert [one.request_id for one in queue.in_turn(9)] == ["b0", "a1"]


def test_a_tenant_that_comes_and_goes_leaves_nothing_in_the_line():
    a, b = Account(Tenant(name="a")), Account(Tenant(name="b"))
    queue = queue_of(sequence("a0", a))
    for number in range(1000):
        b.service_s = 1.0 + number
        brief = sequence(f"b{number}", b)
        queue.push(brief)
        queue.remove(brief)

    assert len(queue._line) < 100
    assert queue.next().request_id == "a0"
