"""A replica that joins while others serve, and replicas without a place; the test plays them all."""

from __future__ import annotations

import pytest

from rota.core.errors import FaultCode, RequestError
from rota.core.events import AdapterRefused, FinishReason, Routed
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Inspect, RemoveAdapter
from rota.core.tenant import Tenant
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.service import ServicePhase
from tests.builders import add_adapter, submit
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, finished, kinds, refused, removed

ONE = AdapterId(1)


def joined(desk: ReplicaDesk, phase: ServicePhase = ServicePhase.STARTING) -> FakeReplica:
    newcomer = FakeReplica(phase)
    desk.add(newcomer)
    return newcomer


def with_adapter(desk: ReplicaDesk, replicas: list[FakeReplica], number: int = 1) -> None:
    desk.send(add_adapter(number))
    for replica in range(len(replicas)):
        desk.note(replica, [added(number, replica)])


def heard(desk: ReplicaDesk, replica: int, *events) -> list:
    """What a client hears, apart from where its requests went."""
    return [event for event in desk.note(replica, [*events]) if not isinstance(event, Routed)]


# ── a replica that joins ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_newcomer_takes_requests_and_queries_once_it_is_ready():
    desk, replicas = desk_of()
    newcomer = joined(desk)
    for name in "abc":
        desk.send(submit(name))
    desk.send(Inspect(0.0))
    assert newcomer.sent == []

    newcomer.become(ServicePhase.READY)
    for name in "def":
        desk.send(submit(name))
    desk.send(Inspect(0.0))
    assert newcomer.requests == ["e"]  # in turn
    assert isinstance(newcomer.sent[-1], Inspect)
    assert [len(one.requests) for one in replicas] == [3, 2]


def test_a_newcomer_is_told_of_all_adapters_and_gets_requests_for_those_that_it_has_read():
    desk, replicas = desk_of()
    for number in (1, 2):
        with_adapter(desk, replicas, number)
    newcomer = joined(desk)
    assert newcomer.adapters == [1, 2]
    newcomer.become(ServicePhase.READY)
    for name in "abc":
        desk.send(submit(name, adapter=ONE))
    assert newcomer.requests == []

    assert heard(desk, 2, added(1, 2)) == []  # the client has heard of it already
    for name in "def":
        desk.send(submit(name, adapter=ONE))
    assert len(newcomer.requests) == 1
    assert newcomer.adapters == [1, 2]


def test_a_newcomer_that_cannot_read_an_adapter_leaves_it_to_the_others():
    desk, replicas = desk_of()
    with_adapter(desk, replicas)
    newcomer = joined(desk, ServicePhase.READY)
    [told] = heard(desk, 2, refused(1, 2))
    assert told.others_serve
    for name in "abc":
        desk.send(submit(name, adapter=ONE))

    assert newcomer.requests == []
    for replica, _ in enumerate(replicas):
        heard(desk, replica, refused(1, replica))  # after a restart
    assert kinds(heard(desk, 2, added(1, 2))) == ["AdapterAdded"], "the newcomer could read it after its own restart"


def test_nobody_waits_for_a_newcomers_answer_before_it_was_ready_once():
    desk, _ = desk_of()
    newcomer = joined(desk)
    desk.send(add_adapter(1))
    assert newcomer.sent == [AddAdapter(adapter=add_adapter(1).adapter, at=0.0, is_known=True, is_read_later=True)]
    assert heard(desk, 0, added(1, 0)) == []
    assert kinds(heard(desk, 1, added(1, 1))) == ["AdapterAdded"]

    desk.send(RemoveAdapter(adapter_id=ONE, at=1.0))
    assert isinstance(newcomer.sent[-1], RemoveAdapter)
    assert heard(desk, 0, removed(1, 0)) == []
    assert kinds(heard(desk, 1, removed(1, 1))) == ["AdapterRemoved"]
    assert heard(desk, 2, added(1, 2), removed(1, 2)) == []


def test_a_newcomer_that_is_ready_is_asked_for_new_adapters_like_the_others():
    desk, _ = desk_of()
    newcomer = joined(desk)
    newcomer.become(ServicePhase.READY)
    desk.send(add_adapter(1))
    assert heard(desk, 0, added(1, 0)) == heard(desk, 1, added(1, 1)) == []
    assert kinds(heard(desk, 2, added(1, 2))) == ["AdapterAdded"]


def test_an_adapter_that_is_being_added_when_a_newcomer_joins_is_refused_there_too_if_one_refuses_it():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    newcomer = joined(desk)
    assert newcomer.adapters == [1]
    heard(desk, 0, refused(1, 0))
    assert [isinstance(one.sent[-1], RemoveAdapter) for one in (*replicas, newcomer)] == [False, True, True]

    heard(desk, 1, added(1, 1))
    [told] = heard(desk, 1, removed(1, 1))
    assert isinstance(told, AdapterRefused)
    assert heard(desk, 2, added(1, 2), removed(1, 2)) == []


def test_an_adapter_that_is_being_removed_when_a_newcomer_joins_is_not_told_there():
    desk, replicas = desk_of()
    with_adapter(desk, replicas)
    desk.send(RemoveAdapter(adapter_id=ONE, at=1.0))
    newcomer = joined(desk)

    assert newcomer.adapters == []


def test_a_newcomer_that_cannot_start_is_told_of_in_the_log_and_the_others_serve_on(caplog):
    desk, replicas = desk_of()
    with_adapter(desk, replicas)
    newcomer = joined(desk)
    newcomer.become(ServicePhase.DOWN, "There is no model.")

    assert heard(desk, 2) == []
    [record] = caplog.records
    assert (record.levelname, record.fields) == ("ERROR", {"engine": 2, "why": "There is no model."})
    desk.send(submit("a", adapter=ONE))
    assert replicas[0].requests == ["a"]


# ── replicas without a place ─────────────────────────────────────────────────────────────────────────────────────────


def test_requests_that_wait_for_a_start_end_when_that_may_last_and_later_ones_are_refused_with_the_reason():
    desk, replicas = desk_of()
    for replica in replicas:
        replica.become(ServicePhase.STARTING)
    for name in "ab":
        desk.send(submit(name))
    replicas[0].lose_place()
    [ending] = heard(desk, 0)
    assert (ending.request_id, ending.reason) == ("a", FinishReason.FAILED)
    assert (ending.fault.code, ending.fault.message) == (FaultCode.ENGINE_DIED, "No GPU is free.")
    desk.send(submit("c"))
    assert replicas[1].requests == ["b", "c"]  # which still starts

    replicas[1].lose_place()
    assert [ending.request_id for ending in heard(desk, 1)] == ["b", "c"]
    with pytest.raises(RequestError, match="No GPU is free"):
        desk.send(submit("d"))


def test_a_request_that_ended_with_the_place_ends_once_also_if_the_replica_gets_one_later():
    desk, replicas = desk_of(1)
    replicas[0].become(ServicePhase.STARTING)
    desk.send(submit("a"))
    replicas[0].lose_place()
    assert kinds(heard(desk, 0)) == ["Finished"]
    assert isinstance(replicas[0].sent[-1], Abort)

    replicas[0].become(ServicePhase.READY)
    assert heard(desk, 0, finished("a", reason=FinishReason.ABORT)) == []
    desk.send(submit("a"))  # the id is free again
    assert kinds(heard(desk, 0, finished("a"))) == ["Finished"]


def test_who_is_held_is_refused_too_when_the_last_place_is_gone():
    desk, replicas = desk_of(1)
    replicas[0].become(ServicePhase.STARTING)
    for name in "ab":
        desk.send(submit(name, tenant=Tenant(name="acme", max_running=1)))
    replicas[0].lose_place()

    told = heard(desk, 0)
    assert [(one.request_id, one.fault.message) for one in told] == [("a", "No GPU is free."), ("b", "No GPU is free.")]


def test_an_adapter_is_answered_for_by_the_replicas_that_have_a_place():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    assert heard(desk, 0, added(1, 0)) == []
    replicas[1].lose_place()
    assert kinds(heard(desk, 1)) == ["AdapterAdded"]

    assert heard(desk, 1, refused(1, 1, "It was killed.")) == []  # it may have died before it read anything
    assert replicas[1].sent[-1] == AddAdapter(adapter=add_adapter(1).adapter, at=1.0, is_known=True, is_read_later=True)
    [lost] = heard(desk, 1, refused(1, 1))
    assert lost.others_serve


def test_a_replica_that_joins_in_the_moment_when_another_loses_its_place_hides_nothing():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    heard(desk, 0, added(1, 0))
    replicas[1].lose_place()
    joined(desk)

    assert kinds(heard(desk, 1)) == ["AdapterAdded"]


def test_an_adapter_is_refused_with_the_reason_when_no_replica_has_a_place():
    desk, replicas = desk_of(1)
    replicas[0].become(ServicePhase.STARTING)
    desk.send(add_adapter(1))
    replicas[0].lose_place()
    [told] = heard(desk, 0)
    assert (type(told), told.reason) == (AdapterRefused, "No GPU is free.")
    assert isinstance(replicas[0].sent[-1], RemoveAdapter)

    with pytest.raises(RequestError, match="No GPU is free"):
        desk.send(add_adapter(2))


def test_the_adapters_of_the_start_wait_for_a_place_as_the_start_does():
    desk, replicas = desk_of(2, ServicePhase.STARTING)
    for replica in replicas:
        replica.lose_place()
    desk.send(add_adapter(1))
    assert [one.adapters for one in replicas] == [[1], [1]]

    replicas[0].become(ServicePhase.READY)
    assert kinds(heard(desk, 0, added(1, 0))) == ["AdapterAdded"]  # the other may wait for ever


def test_a_removal_does_not_wait_for_a_replica_that_has_lost_its_place():
    desk, replicas = desk_of()
    with_adapter(desk, replicas)
    desk.send(RemoveAdapter(adapter_id=ONE, at=1.0))
    assert heard(desk, 0, removed(1, 0)) == []
    replicas[1].lose_place()

    assert kinds(heard(desk, 1)) == ["AdapterRemoved"]
    assert desk.send(RemoveAdapter(adapter_id=ONE, at=1.0)) != []


def test_the_requests_of_a_replica_that_serves_are_not_touched_when_another_has_no_place():
    desk, replicas = desk_of()
    for name in "ab":
        desk.send(submit(name))
    replicas[0].lose_place()
    told = heard(desk, 0, finished("a", reason=FinishReason.FAILED))  # it died

    assert [one.request_id for one in told] == [RequestId("a")]
    assert replicas[1].requests == ["b"]
