"""The client of the engine is what a server has of its engine, or of several: adapters from the start, and a clean end.

An engine imports and reads for seconds. So it may start before the server is ready to hear of it; requests may come
before the adapters to start with are known; and open requests go on once the server takes no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from rota.core.adapter import Adapter
from rota.core.capacity import Capacity
from rota.core.errors import AdapterError, EngineDiedError, Fault, FaultCode, RequestError
from rota.core.events import AdapterAdded, AdapterRefused, Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import AddAdapter, Message, MoveRequests, Pause, RemoveAdapter, Resume
from rota.core.request import Request
from rota.runtime.live import MOST_CHECKED
from rota.runtime.service import Deliver, Service, ServicePhase, ServiceState

# Of thousands of adapters so many are checked before the start: if they are of another model, these show it.
FEW_CHECKED = 64


def early_of(adapters: int, held: int) -> int:
    """Of how many adapters an engine hears at the start: of all that are checked, or that host memory may hold."""
    return adapters if adapters <= MOST_CHECKED else max(FEW_CHECKED, held)


class EngineClient:
    """A service with adapters from the start, which can be closed for new requests while open requests go on.

    It is ready once its first adapters are checked, and fails to start if one of them is bad. They are read while it
    serves: those that requests ask for first, then the others in their order.

    Of thousands, the engine is told of the first ones and of pinned ones at the start, and of each other one with the
    first message that names it. So an adapter without requests costs an engine neither time nor memory.
    """

    def __init__(self, service: Service, adapters: Sequence[Adapter] = (), early: int = MOST_CHECKED) -> None:
        """`early` is how many of the adapters the service is told of at the start."""
        self._service = service
        self._turn = threading.Lock()  # one thread at a time delivers
        self._deliver: Deliver | None = None
        self._kept: list[Event] = []  # until there is a reader
        self._has_begun = False
        self._changed = threading.Condition()
        self._early = [one for at, one in enumerate(adapters) if at < early or one.is_pinned]
        self._missing = {adapter.adapter_id for adapter in self._early}
        self._later = {one.adapter_id: one for one in adapters if one.adapter_id not in self._missing}
        # A message that names one of these goes behind the message that tells of it, whatever threads send them.
        self._telling = threading.Lock()
        self._refusal = ""
        self._open: set[RequestId] = set()
        self._is_closed = False

    @property
    def state(self) -> ServiceState:
        state = self._service.state
        if self._refusal:
            state = ServiceState(phase=ServicePhase.DOWN, reason=self._refusal)
        elif self._missing and state.phase is ServicePhase.READY:
            state = state.as_starting()
        if not self._is_closed:
            return state
        return replace(state, phase=ServicePhase.STOPPED if state.phase is ServicePhase.DOWN else ServicePhase.CLOSING)

    @property
    def open_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """The engine starts now. It is stopped if the block fails, for then no caller would stop it."""
        self._begin()
        try:
            yield
        except BaseException:  # Ctrl-C too: an engine must not outlive a start that fails
            self._service.stop()
            raise

    def start(self, deliver: Deliver) -> None:
        """From now on events are delivered, those that were kept first."""
        now = time.monotonic()
        with self._turn:
            self._deliver = deliver
            kept, self._kept = self._kept, []
            # To clients the adapters of which no engine was told yet are as good as the others.
            kept += [AdapterAdded(adapter_id, now) for adapter_id in self._later]
            if kept:
                self._tell(deliver, kept)
        if not self._has_begun:
            self._begin()

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
        asked = {message.request_id} if isinstance(message, Request) else set[RequestId]()
        with self._changed:
            if self._is_closed and isinstance(message, Request | AddAdapter | Pause):
                raise RequestError(Fault(FaultCode.STOPPING, "The server is stopping and takes no more requests."))
            self._open |= asked
        try:
            for adapter_id in _named_in(message) if self._later else ():
                self._introduce(adapter_id)
            self._service.send(message)
        except RequestError:
            self._forget(asked)
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

    def _begin(self) -> None:
        self._has_begun = True
        self._service.start(self._on_events)
        with suppress(RequestError):  # it is already down, and `wait_until_ready` says so
            for adapter in self._early:
                self._service.send(AddAdapter(adapter=adapter, at=time.monotonic(), is_read_later=True))
        self._early = []

    def _introduce(self, adapter_id: AdapterId) -> None:
        """As known: the service keeps it over a restart, and a bad one is found when it is read."""
        with self._telling:
            if adapter := self._later.get(adapter_id):
                now = time.monotonic()
                self._service.send(AddAdapter(adapter=adapter, at=now, is_known=True, is_read_later=True))
                del self._later[adapter_id]

    def _on_events(self, events: list[Event]) -> None:
        with self._turn:
            if self._deliver is None:
                self._kept += events
            else:
                self._tell(self._deliver, events)

    def _tell(self, deliver: Deliver, events: list[Event]) -> None:
        if self._missing:  # else it is nearly every call
            self._note_first(events)
        # In this order: `drain` must not return before the ends are delivered.
        deliver(events)
        self._forget({event.request_id for event in events if isinstance(event, Finished)})

    def _note_first(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                match event:
                    # A quarantined adapter is no reason to serve none of the others.
                    case AdapterAdded(adapter_id) | AdapterRefused(adapter_id=adapter_id, code=FaultCode.QUARANTINED):
                        self._missing.discard(adapter_id)
                    case AdapterRefused(adapter_id=adapter_id) if adapter_id in self._missing:
                        self._refusal = self._refusal or event.reason
            self._changed.notify_all()

    def _forget(self, ended: set[RequestId]) -> None:
        if ended:
            with self._changed:
                self._open -= ended
                self._changed.notify_all()


def _named_in(message: Message) -> tuple[AdapterId, ...]:
    match message:
        case Request(adapter_id=adapter_id):
            return (adapter_id,)
        case RemoveAdapter(adapter_id=adapter_id):
            return (adapter_id,)
        case MoveRequests(old=old, new=new):
            return old, new
    return ()
