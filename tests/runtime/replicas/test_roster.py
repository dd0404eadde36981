"""Replicas that join while others serve, and those without a place: what they do, and what is told of all together."""

from __future__ import annotations

import pytest

from rota.core.errors import FaultCode, RequestError
from rota.core.events import AdapterRefused, FinishReason, Routed
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Inspect, RemoveAdapter
from rota.core.tenant import Tenant
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.roster import joint_state
from rota.runtime.service import ServicePhase, ServiceState
from tests.builders import add_adapter, capacity, submit
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, finished, kinds, refused, removed

# ── the state of all replicas ─────────────────────────────────────────────────────────────────────────────────────────

SMALL, LARGE = capacity(blocks=32), capacity(blocks=64)
FIRST = ServiceState(phase=ServicePhase.STARTING)
READY = ServiceState(phase=ServicePhase.READY, capacity=LARGE, engine_pid=7, has_served=True)
AGAIN = ServiceState(phase=ServicePhase.STARTING, has_served=True)
BAD = ServiceState(phase=ServicePhase.DOWN, reason="There is no model.")
LOST = ServiceState(phase=ServicePhase.DOWN, reason="It died 5 times.", has_served=True)
WAITS = ServiceState(phase=ServicePhase.STARTING, reason="No GPU is free.", may_last=True)
STOPPED = ServiceState(phase=ServicePhase.DOWN, reason="The engine was stopped.", has_served=True)


@pytest.mark.parametrize(
    ("states", "phase", "reason"),
    [
        ([FIRST, FIRST], ServicePhase.STARTING, ""),
        ([READY, FIRST], ServicePhase.STARTING, ""),  # a server starts with all its replicas
        ([READY, READY], ServicePhase.READY, ""),
        ([READY, BAD], ServicePhase.DOWN, "Replica 1 is down: There is no model."),
        ([BAD, BAD], ServicePhase.DOWN, "There is no model."),
        ([READY, AGAIN], ServicePhase.READY, ""),  # and serves on while one of them starts again
        ([AGAIN, AGAIN], ServicePhase.STARTING, ""),
        ([LOST, READY], ServicePhase.READY, "Replica 0 is down: It died 5 times."),
        ([LOST, AGAIN], ServicePhase.STARTING, "Replica 0 is down: It died 5 times."),
        ([LOST, LOST], ServicePhase.DOWN, "It died 5 times."),
        (
            [LOST, STOPPED],
            ServicePhase.DOWN,
            "Replica 0 is down: It died 5 times. Replica 1 is down: The engine was stopped.",
        ),
    ],
)
def test_the_state_of_all_replicas_together(states, phase, reason):
    state = joint_state(states)

    assert (state.phase, state.reason) == (phase, reason)
    assert (state.capacity is not None) is (phase is ServicePhase.READY)
    assert [engine.engine_id for engine in state.engines] == [0, 1]
    assert [engine.phase for engine in state.engines] == [one.phase for one in states]


@pytest.mark.parametrize(
    ("states", "phase", "reason"),
    [
        ([READY, FIRST], ServicePhase.READY, ""),  # the second joined later
        ([READY, WAITS], ServicePhase.READY, "Replica 1 waits: No GPU is free."),
        ([READY, BAD], ServicePhase.READY, "Replica 1 is down: There is no model."),
        ([FIRST, READY], ServicePhase.STARTING, ""),
        ([FIRST, BAD], ServicePhase.STARTING, "Replica 1 is down: There is no model."),
        ([BAD, READY], ServicePhase.DOWN, "Replica 0 is down: There is no model."),
        ([LOST, FIRST], ServicePhase.STARTING, "Replica 0 is down: It died 5 times."),
        ([LOST, BAD], ServicePhase.DOWN, "Replica 0 is down: It died 5 times. Replica 1 is down: There is no model."),
        ([LOST, READY], ServicePhase.READY, "Replica 0 is down: It died 5 times."),
    ],
)
def test_a_replica_that_joined_later_neither_holds_up_a_start_nor_ends_a_service(states, phase, reason):
    state = joint_state(states, first=1)

    assert (state.phase, state.reason) == (phase, reason)


@pytest.mark.parametrize(
    ("states", "phase", "reason", "may_last"),
    [
        ([WAITS, WAITS], ServicePhase.STARTING, "No GPU is free.", True),
        ([WAITS, FIRST], ServicePhase.STARTING, "Replica 0 waits: No GPU is free.", False),
        ([WAITS, READY], ServicePhase.READY, "Replica 0 waits: No GPU is free.", False),  # it serves with what there is
        (
            [WAITS, BAD],
            ServicePhase.DOWN,
            "Replica 0 waits: No GPU is free. Replica 1 is down: There is no model.",
            False,
        ),
        (
            [WAITS, LOST],
            ServicePhase.STARTING,
            "Replica 0 waits: No GPU is free. Replica 1 is down: It died 5 times.",
            True,
        ),
        ([WAITS, AGAIN], ServicePhase.STARTING, "Replica 0 waits: No GPU is free.", False),
    ],
)
def test_replicas_without_a_place_are_not_waited_for_while_any_other_serves_or_starts(states, phase, reason, may_last):
    state = joint_state(states)

    assert (state.phase, state.reason, state.may_last) == (phase, reason, may_last)


def test_a_service_that_has_served_stays_ready_when_a_replica_gets_its_place_at_last():
    assert joint_state([READY, WAITS]).has_served
    assert joint_state([READY, FIRST], has_served=True).phase is ServicePhase.READY
    assert joint_state([READY, BAD], has_served=True).phase is ServicePhase.READY


def test_what_fits_into_the_smallest_replica_that_serves_is_what_the_service_can_hold():
    small = ServiceState(phase=ServicePhase.READY, capacity=SMALL, has_served=True)

    assert joint_state([READY, small]).capacity == SMALL
    assert joint_state([READY, LOST]).capacity == LARGE


def test_a_service_that_may_not_be_used_yet_has_no_engine_that_is_up():
    early = joint_state([READY, READY]).as_starting()

    assert (early.phase, early.capacity) == (ServicePhase.STARTING, None)
    assert [(engine.phase, engine.capacity, engine.engine_pid) for engine in early.engines] == [
        (ServicePhase.STARTING, None, 7)
    ] * 2


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
