"""A preloaded service is ready once its first adapters are checked, and fails to start if one of them is bad."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeGuard

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import AdapterError, EngineDiedError, FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, Event
from rota.core.ids import AdapterId
from rota.core.messages import AddAdapter, Message, MoveRequests, RemoveAdapter, Submit
from rota.runtime.live import MOST_CHECKED
from rota.runtime.service import Deliver, Service, ServicePhase, ServiceState

# Of thousands of adapters so many are checked before the start: if they are of another model, these show it.
FEW_CHECKED = 64


def early_of(adapters: int, held: int) -> int:
    """Of how many adapters an engine hears at the start: of all that are checked, or that host memory may hold."""
    return adapters if adapters <= MOST_CHECKED else max(FEW_CHECKED, held)


class PreloadedService:
    """Another service with adapters from the start; earlier requests wait until the adapters are known.

    The adapters are read while the service serves: those that requests ask for first, then the others in their order.

    Of thousands, the service is told of the first ones and of pinned ones at the start, and of each other one with the
    first message that names it. So an adapter without requests costs an engine neither time nor memory.
    """

    def __init__(self, service: Service, adapters: Sequence[Adapter], early: int = MOST_CHECKED) -> None:
        """`early` is how many of them the service is told of at the start."""
        self._service = service
        self._early = [one for at, one in enumerate(adapters) if at < early or one.is_pinned]
        self._changed = threading.Condition()
        self._missing = {adapter.adapter_id for adapter in self._early}
        self._later = {one.adapter_id: one for one in adapters if one.adapter_id not in self._missing}
        # A message that names one of these goes behind the message that tells of it, whatever threads send them.
        self._telling = threading.Lock()
        self._refusal = ""

    @property
    def state(self) -> ServiceState:
        state = self._service.state
        if self._refusal:
            return ServiceState(phase=ServicePhase.DOWN, reason=self._refusal)
        is_early = bool(self._missing) and state.phase is ServicePhase.READY
        return state.as_starting() if is_early else state

    def start(self, deliver: Deliver) -> None:
        def note(events: list[Event]) -> None:
            self._note(events)
            deliver(events)

        self._service.start(note)
        with suppress(RequestError):  # it is already down, and `wait_until_ready` says so
            for adapter in self._early:
                self._service.send(AddAdapter(adapter=adapter, at=time.monotonic(), is_read_later=True))
        self._early = []
        if self._later:
            now = time.monotonic()
            deliver([AdapterAdded(adapter_id, now) for adapter_id in self._later])

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
        if self._later:
            for adapter_id in _named_in(message):
                self._introduce(adapter_id)
        self._service.send(message)

    def stop(self) -> None:
        self._service.stop()

    def _introduce(self, adapter_id: AdapterId) -> None:
        """As known: the service keeps it over a restart, and a bad one is found when it is read."""
        with self._telling:
            if adapter := self._later.get(adapter_id):
                now = time.monotonic()
                self._service.send(AddAdapter(adapter=adapter, at=now, is_known=True, is_read_later=True))
                del self._later[adapter_id]

    def _note(self, events: list[Event]) -> None:
        if not self._missing:
            return  # nearly every call
        with self._changed:
            for event in events:
                if isinstance(event, AdapterAdded) or _is_set_aside(event):
                    self._missing.discard(event.adapter_id)
                elif isinstance(event, AdapterRefused) and event.adapter_id in self._missing:
                    self._refusal = self._refusal or event.reason
            self._changed.notify_all()


def _is_set_aside(event: Event) -> TypeGuard[AdapterRefused]:
    """A quarantined adapter is no reason to serve none of the others."""
    return isinstance(event, AdapterRefused) and event.code is FaultCode.QUARANTINED


def _named_in(message: Message) -> tuple[AdapterId, ...]:
    match message:
        case Submit(request):
            return (request.adapter_id,)
        case RemoveAdapter(adapter_id=adapter_id):
            return (adapter_id,)
        case MoveRequests(old=old, new=new):
            return old, new
    return ()
