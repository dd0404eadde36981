"""A preloaded service is ready once its first adapters are checked, and fails to start if one of them is bad."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import AdapterError, EngineDiedError, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, Event
from rota.core.messages import AddAdapter, Message
from rota.runtime.service import Deliver, Phase, Service, ServiceState


class PreloadedService:
    """Another service with adapters from the start; earlier requests wait until the adapters are known.

    The adapters are read while the service serves: those that requests ask for first, then the others in their order.
    """

    def __init__(self, service: Service, adapters: Sequence[Adapter]) -> None:
        self._service = service
        self._adapters = adapters
        self._changed = threading.Condition()
        self._missing = {adapter.adapter_id for adapter in adapters}
        self._refusal = ""

    @property
    def state(self) -> ServiceState:
        state = self._service.state
        if self._refusal:
            return ServiceState(phase=Phase.DOWN, reason=self._refusal)
        is_early = bool(self._missing) and state.phase is Phase.READY
        return state.as_starting() if is_early else state

    def start(self, deliver: Deliver) -> None:
        def note(events: list[Event]) -> None:
            self._note(events)
            deliver(events)

        self._service.start(note)
        with suppress(RequestError):  # it is already down, and `wait_until_ready` says so
            for adapter in self._adapters:
                self._service.send(AddAdapter(adapter=adapter, at=time.monotonic(), is_read_later=True))

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        capacity = self._service.wait_until_ready(timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._refusal or not self._missing, timeout_s)
            if self._refusal:
                raise AdapterError(self._refusal)
            if self._missing:
                raise EngineDiedError(
                    f"{len(self._missing)} adapters are still being checked after {timeout_s} seconds."
                )
        return capacity

    def send(self, message: Message) -> None:
        self._service.send(message)

    def stop(self) -> None:
        self._service.stop()

    def _note(self, events: list[Event]) -> None:
        if not self._missing:
            return  # nearly every call
        with self._changed:
            for event in events:
                if isinstance(event, AdapterAdded):
                    self._missing.discard(event.adapter_id)
                elif isinstance(event, AdapterRefused) and event.adapter_id in self._missing:
                    self._refusal = self._refusal or event.reason
            self._changed.notify_all()
