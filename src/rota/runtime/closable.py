"""A closable service takes no more requests once it is closed, and knows when the last open request has ended."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

from rota.core.capacity import Capacity
from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import Event, Finished
from rota.core.ids import RequestId
from rota.core.messages import AddAdapter, Message, Pause, Resume, Submit
from rota.runtime.service import Deliver, Service, ServicePhase, ServiceState


class ClosableService:
    """Another service that can be closed for new requests while open requests go on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changed = threading.Condition()
        self._open: set[RequestId] = set()
        self._is_closed = False

    @property
    def state(self) -> ServiceState:
        state = self._service.state
        if not self._is_closed:
            return state
        return replace(state, phase=ServicePhase.STOPPED if state.phase is ServicePhase.DOWN else ServicePhase.CLOSING)

    @property
    def open_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    def start(self, deliver: Deliver) -> None:
        def note(events: list[Event]) -> None:
            # In this order: `drain` must not return before the ends are delivered.
            deliver(events)
            self._forget({event.request_id for event in events if isinstance(event, Finished)})

        self._service.start(note)

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        return self._service.wait_until_ready(timeout_s)

    def send(self, message: Message) -> None:
        if not isinstance(message, Submit | AddAdapter | Pause):
            return self._service.send(message)
        with self._changed:
            if self._is_closed:
                raise RequestError(Fault(FaultCode.STOPPING, "The server is stopping and takes no more requests."))
            if isinstance(message, Submit):
                self._open.add(message.request.request_id)
        try:
            self._service.send(message)
        except RequestError:
            if isinstance(message, Submit):
                self._forget({message.request.request_id})
            raise

    def close(self) -> None:
        """Take no more requests, from now on. A pause ends: open requests go on."""
        with self._changed:
            self._is_closed = True
        with suppress(RequestError):  # the service may be down
            self._service.send(Resume(time.monotonic()))

    def drain(self, timeout_s: float) -> None:
        """Close, and block until all requests have ended or `timeout_s` is over."""
        self.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def stop(self) -> None:
        self._service.stop()

    def _forget(self, ended: set[RequestId]) -> None:
        if ended:
            with self._changed:
                self._open -= ended
                self._changed.notify_all()
