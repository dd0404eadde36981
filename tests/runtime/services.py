"""For tests of services: a listener that keeps events and waits for endings, and a service in its own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from rota.core.config import EngineConfig
from rota.core.events import AdapterAdded, AdapterRefused, AdapterRemoved, Event, Finished
from rota.core.ids import RequestId
from rota.runtime.blame import Blame
from rota.runtime.process import EngineProcess
from rota.runtime.service import BuildDevice, Service
from rota.runtime.supervisor import NewEngine, SupervisedService
from rota.runtime.timeouts import EngineTimeouts
from tests.builders import capacity
from tests.fakes import FakeDevice, endings, outputs
from tests.waiting import TIMEOUT_S

# An answer of so many tokens lasts for longer than any test may.
LONG = 100_000
SLOW = partial(FakeDevice, capacity=capacity(blocks=10 * LONG // 16, max_sequence_tokens=2 * LONG), step_s=0.02)

AnyService = TypeVar("AnyService", bound=Service)
AdapterEvent = AdapterAdded | AdapterRefused | AdapterRemoved


class Listener:
    """Keeps every delivered event; other threads may wait for what they say."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.threads.add(threading.get_ident())
            self.events.extend(events)
            self._changed.notify_all()

    def wait_for_tokens(self, request_id: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        self._wait_for(lambda: len(outputs(self.events).get(RequestId(request_id), [])) >= count, timeout_s)

    def wait_for_ending(self, request_id: str, timeout_s: float = TIMEOUT_S) -> Finished:
        self._wait_for(lambda: RequestId(request_id) in endings(self.events), timeout_s)
        return endings(self.events)[RequestId(request_id)]

    def wait_for_adapter(
        self, adapter_id: int, kind: type[AdapterEvent], times: int = 1, timeout_s: float = TIMEOUT_S
    ) -> AdapterEvent:
        """The event of this kind that tells of an adapter for the so-manieth time."""

        def told() -> list[AdapterEvent]:
            return [event for event in self.events if isinstance(event, kind) and event.adapter_id == adapter_id]

        self._wait_for(lambda: len(told()) >= times, timeout_s)
        return told()[times - 1]

    def _wait_for(self, claim: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            assert self._changed.wait_for(claim, timeout_s), f"not within {timeout_s} s: {self.events[-3:]}"


Heard = AbstractContextManager[tuple[SupervisedService, Listener]]


@contextmanager
def heard(service: AnyService) -> Iterator[tuple[AnyService, Listener]]:
    """A service that has been started and stops with the block, and a listener to its events."""
    listener = Listener()
    service.start(listener)
    try:
        yield service, listener
    finally:
        service.stop()


def supervised(
    build_device: BuildDevice,
    timeouts: EngineTimeouts | None = None,
    new_engine: NewEngine = EngineProcess,
    config: EngineConfig | None = None,
    blame: Blame | None = None,
) -> Heard:
    return heard(SupervisedService(build_device, config or EngineConfig(), timeouts, new_engine, blame=blame))
