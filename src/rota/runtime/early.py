"""An early service starts before its events have a reader, and keeps them until the reader comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rota.core.capacity import Capacity
from rota.core.events import Event
from rota.core.messages import Message
from rota.runtime.service import Deliver, Service, ServiceState


class EarlyService:
    """Another service. An engine imports and reads for seconds, and the server gets ready meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = threading.Lock()  # one thread at a time delivers
        self._deliver: Deliver | None = None
        self._kept: list[Event] = []

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The service starts now. It is stopped if the block fails, for then no caller would stop it."""
        self._service.start(self._note)
        try:
            yield
        except BaseException:  # Ctrl-C too: an engine must not outlive a start that fails
            self._service.stop()
            raise

    @property
    def state(self) -> ServiceState:
        return self._service.state

    def start(self, deliver: Deliver) -> None:
        """From now on events are delivered, those that were kept first."""
        with self._turn:
            self._deliver = deliver
            kept, self._kept = self._kept, []
            if kept:
                deliver(kept)

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        return self._service.wait_until_ready(timeout_s)

    def send(self, message: Message) -> None:
        self._service.send(message)

    def stop(self) -> None:
        self._service.stop()

    def _note(self, events: list[Event]) -> None:
        with self._turn:
            if self._deliver is None:
                self._kept += events
            else:
                self._deliver(events)
