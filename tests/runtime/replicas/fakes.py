"""Replicas that a test plays itself: they keep what they are sent, and say what the test lets them say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, Finished, FinishReason
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.core.messages import AddAdapter, Message
from rota.core.request import Request
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.roster import Roster
from rota.runtime.replicas.router import Router
from rota.runtime.service import Deliver, ServicePhase, ServiceState, refuse
from tests.builders import add_adapter, capacity
from tests.fakes import FakeDevice
from tests.runtime.services import SLOW
from tests.waiting import until


class FakeReplica:
    """A service in whatever phase the test puts it."""

    def __init__(self, phase: ServicePhase = ServicePhase.READY) -> None:
        self.state = ServiceState(phase=ServicePhase.STARTING)
        self.sent: list[Message] = []
        self.become(phase)

    def become(self, phase: ServicePhase, reason: str = "", may_last: bool = False) -> None:
        self.state = ServiceState(
            phase=phase,
            capacity=capacity() if phase is ServicePhase.READY else None,
            reason=reason,
            may_last=may_last,
            has_served=self.state.has_served or phase is ServicePhase.READY,
        )

    def lose_place(self) -> None:
        self.become(ServicePhase.STARTING, "No GPU is free.", may_last=True)

    def send(self, message: Message) -> None:
        if self.state.phase is ServicePhase.DOWN:
            raise refuse(self.state.reason)
        self.sent.append(message)

    @property
    def requests(self) -> list[RequestId]:
        return [message.request_id for message in self.sent if isinstance(message, Request)]

    @property
    def adapters(self) -> list[AdapterId]:
        return [message.adapter.adapter_id for message in self.sent if isinstance(message, AddAdapter)]

    def start(self, deliver: Deliver) -> None: ...

    def stop(self) -> None: ...

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        raise NotImplementedError(timeout_s)


def desk_of(replicas: int = 2, phase: ServicePhase = ServicePhase.READY) -> tuple[ReplicaDesk, list[FakeReplica]]:
    """A desk that gives requests to its replicas in turn, at the time 5.0."""
    fakes = [FakeReplica(phase) for _ in range(replicas)]
    return ReplicaDesk(Roster(fakes), Router(replicas, "round-robin"), lambda: 5.0), fakes


def added(number: int, engine: int = 0) -> AdapterAdded:
    return AdapterAdded(AdapterId(number), 1.0, EngineId(engine))


def refused(number: int, engine: int = 0, reason: str = "It is broken.") -> AdapterRefused:
    return AdapterRefused(adapter_id=AdapterId(number), at=1.0, reason=reason, engine_id=EngineId(engine))


def removed(number: int, engine: int = 0) -> AdapterRemoved:
    return AdapterRemoved(AdapterId(number), 1.0, EngineId(engine))


def finished(id: str, **fields: Any) -> Finished:
    return Finished(request_id=RequestId(id), at=1.0, **{"reason": FinishReason.STOP, **fields})


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def down(state: ServiceState, reason: str) -> ServiceState:
    return replace(state, phase=ServicePhase.DOWN, capacity=None, reason=reason)


# Devices of replicas in processes, which read this module and not the tests with all that those import.
class FolderDevice(FakeDevice):
    """Reads an adapter as long as its folder is there, and does not begin before a file called "go" is."""

    def fetch(self, adapter: Adapter) -> Message:
        folder = Path(adapter.path)
        if "slow" in folder.name:
            (folder / str(os.getpid())).touch()
            assert until(lambda: (folder / "go").exists())
        return super().fetch(adapter if folder.is_dir() else add_adapter(adapter.adapter_id, path="broken").adapter)


class DoomedDevice(FakeDevice):
    """Dies at once if there is a file that says so."""

    def __init__(self, mark: Path) -> None:
        if mark.exists():
            os._exit(7)
        super().__init__(**SLOW.keywords)
