"""What one replica has read first is the version for all of them."""

from __future__ import annotations

from rota.core.events import HostChanged, HostState
from rota.core.ids import AdapterId, EngineId
from rota.core.messages import AddAdapter, SealAdapter
from rota.runtime.replicas.adapters import ReplicaAdapters
from tests.builders import add_adapter
from tests.runtime.replicas.fakes import FakeReplica, added, desk_of, kinds


def held(engine: int, *seals: str) -> HostChanged:
    return HostChanged(
        at=1.0, adapter_id=AdapterId(1), state=HostState.HELD, engine_id=EngineId(engine), size_bytes=9, seals=seals
    )


def told(replicas: list[FakeReplica]) -> list[list[tuple[str, ...]]]:
    return [[message.seals for message in one.sent if isinstance(message, SealAdapter)] for one in replicas]


def test_the_others_hear_of_the_first_read_and_not_of_later_ones():
    desk, replicas = desk_of(3)
    desk.send(add_adapter(1))
    desk.note(0, [added(1, 0)])
    heard = desk.note(1, [held(1, "first"), added(1, 1)])
    desk.note(0, [held(0, "other")])
    desk.note(1, [held(1, "first")])

    assert told(replicas) == [[("first",)], [], [("first",)]]
    assert kinds(heard) == ["HostChanged"], "observers hear of it as before"


def test_a_replica_that_comes_later_is_told_with_the_adapter():
    sent = list[tuple[int, object]]()
    adapters = ReplicaAdapters(lambda number, message: sent.append((number, message)) or True)
    adapters.add(add_adapter(1), [0])
    adapters.seal(0, held(0, "first"))
    adapters.introduce(1, at=2.0)

    [seals] = [message.adapter.seals for number, message in sent if number == 1 and isinstance(message, AddAdapter)]
    assert seals == ("first",)
