"""An adapter that engines died of is taken from all replicas, whatever they are doing with it."""

from __future__ import annotations

from dataclasses import replace

from rota.core.errors import FaultCode
from rota.core.events import AdapterRefused
from rota.core.messages import RemoveAdapter
from tests.builders import add_adapter
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, kinds, refused, removed


def set_aside(engine: int) -> AdapterRefused:
    return replace(refused(1, engine), code=FaultCode.QUARANTINED)


def removals(replicas: list[FakeReplica]) -> list[int]:
    return [sum(isinstance(message, RemoveAdapter) for message in one.sent) for one in replicas]


def test_one_that_serves_is_taken_from_every_replica_and_a_client_hears_of_it_once():
    desk, replicas = desk_of(3)
    desk.send(add_adapter(1))
    for number in range(3):
        desk.note(number, [added(1, number)])
    heard = desk.note(1, [set_aside(1)])
    assert [(event.code, event.others_serve) for event in heard] == [(FaultCode.QUARANTINED, False)]
    assert removals(replicas) == [1, 1, 1]
    later = [*desk.note(0, [removed(1, 0)]), *desk.note(2, [removed(1, 2)]), *desk.note(1, [set_aside(1)])]
    later += desk.note(1, [refused(1, 1)])
    assert [event for event in later if isinstance(event, AdapterRefused)] == []


def test_one_that_is_being_added_is_refused_by_all():
    desk, replicas = desk_of(2)
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    heard = [*desk.note(1, [set_aside(1)]), *desk.note(0, [removed(1, 0)]), *desk.note(1, [refused(1, 1)])]
    assert kinds(heard).count("AdapterRefused") == 1
    assert heard[-1].code is FaultCode.QUARANTINED
    assert removals(replicas) == [1, 1]
