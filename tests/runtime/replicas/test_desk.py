"""Which replica hears of which message, and what a client hears of events; the test plays the replicas."""

from __future__ import annotations

import pytest

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import (
    AdapterStanding,
    Admitted,
    Event,
    Explained,
    FinishReason,
    Inspected,
    Routed,
    Whereabouts,
)
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.core.messages import Abort, AbortAll, Explain, FlushCache, Inspect, Message, RemoveAdapter, ServedElsewhere
from rota.core.tenant import Tenant
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.roster import Roster
from rota.runtime.replicas.router import Router
from rota.runtime.service import ServicePhase, ServiceState
from tests.builders import abort, add_adapter, submit
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, finished, kinds, refused, removed

ONE = Tenant(name="acme", max_running=1, max_queued=3)


def sent_to(replicas: list[FakeReplica], kind: type[Message]) -> list[int]:
    return [number for number, one in enumerate(replicas) for message in one.sent if isinstance(message, kind)]


def with_adapter(desk: ReplicaDesk, number: int = 1) -> None:
    desk.send(add_adapter(number))
    for replica in (0, 1):
        desk.note(replica, [added(number, replica)])


def heard(desk: ReplicaDesk, replica: int, events: list[Event]) -> list[Event]:
    """What a client hears, apart from where its requests went."""
    return [event for event in desk.note(replica, events) if not isinstance(event, Routed)]


def test_what_is_about_a_request_goes_to_the_replica_that_has_it():
    desk, replicas = desk_of()
    for name in "abcd":
        desk.send(submit(name))
    desk.send(abort("b"))
    desk.send(Explain(RequestId("c"), 0.0))

    assert [one.requests for one in replicas] == [["a", "c"], ["b", "d"]]
    assert (sent_to(replicas, Abort), sent_to(replicas, Explain)) == ([1], [0])
    desk.note(1, [finished("b")])
    assert desk.send(abort("b")) == []
    assert desk.send(Explain(RequestId("b"), 7.0)) == [
        Explained(request_id=RequestId("b"), at=7.0, state=Whereabouts.UNKNOWN)
    ]


@pytest.mark.parametrize("message", [Inspect(0.0), FlushCache(0.0)])
def test_what_is_about_the_service_goes_to_every_replica_that_serves(message):
    desk, replicas = desk_of(3)
    replicas[1].become(ServicePhase.STARTING)
    desk.send(message)

    assert sent_to(replicas, type(message)) == [0, 2]


def test_an_abort_of_everything_reaches_replicas_that_start_and_requests_that_are_held():
    desk, replicas = desk_of()
    for name in ("a", "held"):
        desk.send(submit(name, tenant=ONE))
    replicas[1].become(ServicePhase.STARTING)

    [ending] = desk.send(AbortAll(1.0))
    assert (ending.request_id, ending.reason) == ("held", FinishReason.ABORT)
    assert sent_to(replicas, AbortAll) == [0, 1]


def test_no_request_goes_to_a_replica_that_starts_again_or_is_down_and_then_it_takes_its_share_again():
    desk, replicas = desk_of()
    replicas[0].become(ServicePhase.STARTING)
    for name in "ab":
        desk.send(submit(name))
    replicas[0].become(ServicePhase.READY)
    for name in "cd":
        desk.send(submit(name))
    replicas[1].become(ServicePhase.DOWN)
    desk.send(submit("e"))

    assert [one.requests for one in replicas] == [["c", "e"], ["a", "b", "d"]]


def test_while_no_replica_serves_requests_wait_for_those_that_start():
    desk, replicas = desk_of()
    replicas[0].become(ServicePhase.STARTING)
    replicas[1].become(ServicePhase.DOWN)
    desk.send(submit("a"))
    assert replicas[0].requests == ["a"]

    replicas[0].become(ServicePhase.DOWN)
    with pytest.raises(RequestError):
        desk.send(submit("b"))


class GoesDown(FakeReplica):
    """Is ready when it is looked at, and down when it is sent something."""

    def send(self, message: Message) -> None:
        self.become(ServicePhase.DOWN, "It died just now.")
        super().send(message)


def test_a_request_for_a_replica_that_goes_down_just_then_goes_to_another():
    replicas = [GoesDown(), FakeReplica()]
    desk = ReplicaDesk(Roster(replicas), Router(2, "round-robin"))
    desk.send(submit("a"))

    assert replicas[1].requests == ["a"]


def test_a_tenant_runs_no_more_than_it_may_on_all_replicas_and_the_next_is_sent_when_one_ends():
    desk, replicas = desk_of()
    for name in ("a", "b", "c"):
        assert desk.send(submit(name, tenant=ONE)) == []
    desk.send(submit("other", tenant="other"))
    assert [one.requests for one in replicas] == [["a"], ["other"]]

    [full] = desk.send(submit("d", tenant=ONE))
    assert full.fault.code is FaultCode.QUEUE_FULL
    [explained] = desk.send(Explain(RequestId("c"), 1.0))
    assert (explained.state, "max_running" in explained.reason) == (Whereabouts.WAITING, True)

    assert kinds(heard(desk, 0, [finished("a")])) == ["Finished"]
    assert replicas[0].requests == ["a", "b"]
    [ending] = desk.send(Abort(RequestId("c"), 2.0, is_complete=True))
    assert (ending.request_id, ending.reason, ending.at) == ("c", FinishReason.STOP, 2.0)


def test_a_dead_replicas_places_go_to_requests_that_are_held_and_they_go_elsewhere():
    desk, replicas = desk_of()
    for name in ("a", "b"):
        desk.send(submit(name, tenant=ONE))
    replicas[0].become(ServicePhase.STARTING)
    desk.note(0, [finished("a", reason=FinishReason.FAILED)])

    assert replicas[1].requests == ["b"]


def test_the_last_replica_takes_with_it_what_is_held():
    desk, replicas = desk_of()
    for name in ("a", "b"):
        desk.send(submit(name, tenant=ONE))
    for replica in replicas:
        replica.become(ServicePhase.DOWN, "It is gone.")

    told = heard(desk, 0, [finished("a", reason=FinishReason.FAILED)])
    assert [event.request_id for event in told] == ["a", "b"]
    assert told[1].fault.code is FaultCode.ENGINE_DIED


def test_a_stop_ends_what_is_held_and_sends_nothing_more():
    desk, replicas = desk_of()
    for name in ("a", "b"):
        desk.send(submit(name, tenant=ONE))

    assert [event.request_id for event in desk.close()] == ["b"]
    desk.note(0, [finished("a")])
    assert [one.requests for one in replicas] == [["a"], []]


def test_what_is_held_is_counted_once_among_those_that_wait():
    desk, _ = desk_of()
    for name in ("a", "b", "c"):
        desk.send(submit(name, tenant=ONE, arrived_at=3.0))
    standing = AdapterStanding(adapter_id=AdapterId(0), waiting=1, running=0, parked=0, oldest_at=4.0, reason="other")
    answers = [
        Inspected(at=5.0, steps=1, rows=0, blocks=8, blocks_used=0, slots=2, adapters=(standing,), engine_id=number)
        for number in (0, 1)
    ]
    [first], [second] = [heard(desk, number, [answer]) for number, answer in enumerate(answers)]

    assert [one.adapters[0].waiting for one in (first, second)] == [3, 1]
    assert (first.adapters[0].oldest_at, "max_running" in first.adapters[0].reason) == (3.0, True)


def test_an_adapter_is_removed_behind_the_requests_for_it_that_are_held():
    desk, replicas = desk_of()
    with_adapter(desk)
    for name in ("a", "b"):
        desk.send(submit(name, tenant=ONE, adapter=AdapterId(1)))
    assert desk.send(RemoveAdapter(adapter_id=AdapterId(1), at=1.0)) == []
    assert sent_to(replicas, RemoveAdapter) == []

    desk.note(0, [finished("a")])
    assert replicas[1].requests == ["b"]
    assert sent_to(replicas, RemoveAdapter) == [0, 1]
    assert isinstance(replicas[1].sent[-1], RemoveAdapter)


def test_requests_for_an_adapter_go_to_the_replicas_that_could_read_it_again():
    desk, replicas = desk_of()
    with_adapter(desk)
    [told] = desk.note(0, [refused(1, 0)])
    assert told.others_serve
    for name in "abc":
        desk.send(submit(name, adapter=AdapterId(1)))
    assert [one.requests for one in replicas] == [[], ["a", "b", "c"]]

    replicas[1].become(ServicePhase.STARTING)  # it will read the adapter again, so they wait for it
    desk.send(submit("d", adapter=AdapterId(1)))
    assert replicas[1].requests[-1] == "d"
    desk.note(1, [refused(1, 1)])
    desk.send(submit("e", adapter=AdapterId(1)))
    assert replicas[0].requests == ["e"]  # which refuses it with the reason


def test_an_adapter_goes_everywhere_and_waits_for_no_replica_that_starts_again():
    desk, replicas = desk_of(3)
    replicas[1].become(ServicePhase.STARTING)
    replicas[2].become(ServicePhase.DOWN)
    desk.send(add_adapter(1))

    assert [one.adapters for one in replicas] == [[1], [1], []]
    assert kinds(desk.note(0, [added(1, 0)])) == ["AdapterAdded"]
    desk.send(submit("a", adapter=AdapterId(1)))
    replicas[1].become(ServicePhase.READY)
    desk.send(submit("b", adapter=AdapterId(1)))
    assert (replicas[0].requests, replicas[1].requests) == (["a", "b"], []), "the other has not read it yet"
    assert heard(desk, 1, [added(1, 1)]) == []
    for name in "cd":
        desk.send(submit(name, adapter=AdapterId(1)))
    assert replicas[1].requests, "it has the adapter now"


def test_an_adapter_waits_for_a_start_while_no_replica_serves():
    desk, replicas = desk_of()
    for replica in replicas:
        replica.become(ServicePhase.STARTING)
    desk.send(add_adapter(1))

    assert desk.note(0, [added(1, 0)]) == []
    assert kinds(desk.note(1, [added(1, 1)])) == ["AdapterAdded"]


def test_a_replica_that_dies_while_it_reads_an_adapter_refuses_it_for_all():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    assert desk.note(1, [refused(1, 1, "It was killed.")]) == []
    assert [message.is_forced for message in replicas[0].sent if isinstance(message, RemoveAdapter)] == [True]

    [told] = desk.note(0, [removed(1, 0)])
    assert told.reason == "It was killed."


def test_an_adapter_that_is_lost_again_before_all_have_added_it_is_refused_for_all():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    assert desk.note(0, [refused(1, 0, "Its folder is gone.")]) == []  # says the engine that came after a death
    assert sent_to(replicas, RemoveAdapter) == [0, 1], "no engine tries it once more"

    [late] = desk.send(submit("late", adapter=AdapterId(1)))
    assert late.fault == Fault(FaultCode.ADAPTER_FAILED, "Its folder is gone.", "model")
    assert desk.note(0, [refused(1, 0, "No adapter with the id 1 is known.")]) == []
    [told] = desk.note(1, [removed(1, 1)])
    assert told.reason == "Its folder is gone."


def test_requests_for_an_adapter_that_one_replica_has_refused_end_with_its_reason():
    desk, replicas = desk_of()
    desk.send(add_adapter(1))
    desk.send(submit("waits", adapter=AdapterId(1)))
    desk.note(1, [refused(1, 1, "It has no weights.")])
    fault = Fault(FaultCode.ADAPTER_FAILED, "It has no weights.", "model")
    assert [message.fault for message in replicas[0].sent if isinstance(message, RemoveAdapter)] == [fault]

    [late] = desk.send(submit("comes late", adapter=AdapterId(1)))
    assert (late.request_id, late.reason, late.fault) == ("comes late", FinishReason.FAILED, fault)
    assert replicas[0].requests == ["waits"]


def test_a_replica_hears_what_a_tenant_got_elsewhere_while_it_shares_with_others():
    desk, replicas = desk_of()
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "two")):
        desk.send(submit(name, tenant=tenant))
    desk.note(0, [finished("a", prompt_tokens=10, cached_tokens=4, output_tokens=7)])
    desk.note(1, [finished("b", reason=FinishReason.FAILED, fault=Fault(FaultCode.ENGINE_DIED, "It died."))])

    assert [message for one in replicas for message in one.sent if isinstance(message, ServedElsewhere)] == [
        ServedElsewhere("one", 6, 7)
    ]
    assert isinstance(replicas[1].sent[-1], ServedElsewhere)


def test_events_of_requests_pass_unchanged():
    desk, _ = desk_of()
    desk.send(submit("a", tenant=ONE))
    events = [Admitted(request_id=RequestId("a"), at=1.0, cached_tokens=0), finished("a")]

    assert heard(desk, 0, events) == events


def test_where_a_request_went_and_why_is_told_once_and_before_the_request_itself():
    desk, _ = desk_of()
    for name in "ab":
        desk.send(submit(name))
    admitted = Admitted(request_id=RequestId("b"), at=6.0, cached_tokens=0)
    told = desk.note(1, [admitted])

    assert told[:2] == [
        Routed(request_id=RequestId(name), at=5.0, reason="in_turn", engine_id=EngineId(replica))
        for replica, name in enumerate("ab")
    ]
    assert told[2:] == [admitted]
    assert desk.note(0, [finished("a")]) == [finished("a")]


class Looked(FakeReplica):
    """Counts how often somebody looks at its state."""

    looks = 0

    @property
    def state(self) -> ServiceState:
        self.looks += 1
        return self._state

    @state.setter
    def state(self, state: ServiceState) -> None:
        self._state = state

    def send(self, message: Message) -> None:
        """As a replica does that is not looked at for it."""
        self.sent.append(message)


def test_a_request_takes_one_look_at_each_replica_however_many_there_are():
    replicas = [Looked() for _ in range(16)]
    desk = ReplicaDesk(Roster(replicas), Router(16))
    desk.send(submit("first"))
    desk.note(3, [])  # the first word of a replica is news
    before = [one.looks for one in replicas]
    desk.send(submit("second"))
    desk.note(3, [Admitted(request_id=RequestId("first"), at=1.0, cached_tokens=0)])

    looks = [one.looks - earlier for one, earlier in zip(replicas, before, strict=True)]
    assert looks == [1] * 3 + [2] + [1] * 12  # and events look at their own replica only
