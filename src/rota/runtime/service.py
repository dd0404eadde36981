"""A service takes messages and returns events: a server knows nothing else of scheduler, loop and engine."""

from __future__ import annotations

import errno
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from rota.core.capacity import Capacity
from rota.core.config import EngineConfig
from rota.core.errors import EngineDiedError, Fault, FaultCode, RequestError, RotaError
from rota.core.events import Event
from rota.core.ids import FIRST_ENGINE, EngineId
from rota.core.messages import Message
from rota.core.stages import Stage
from rota.core.standstill import StoodStill, WentOn
from rota.runtime.promises import Promises
from rota.runtime.world import Device

# How allocators say that memory is short, under whatever class of error.
_SHORTAGE = re.compile(r"out of memory|allocate memory|ALLOC_FAILED", re.IGNORECASE)

Deliver = Callable[[list[Event]], None]
BuildDevice = Callable[[], Device[Any]]


class ServicePhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CLOSING = "draining"  # open requests are served, new requests are refused
    DOWN = "down"
    STOPPED = "stopped"  # down because `stop` was called; stays down


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """Whether a service serves: its capacity if it does, the reason if it does not."""

    phase: ServicePhase
    capacity: Capacity | None = None
    reason: str = ""
    # It starts, and that may take hours: the engine has no place to run, as the reason says. No request waits for such
    # a start, and no adapter does where other engines serve.
    may_last: bool = False
    engine_pid: int | None = None  # of an engine that has a process of its own
    engine_id: EngineId = FIRST_ENGINE
    has_served: bool = False  # it was ready once
    start: tuple[Stage, ...] = ()  # the stages of the first start, once it is over
    restart: tuple[Stage, ...] = ()  # and of the last restart
    standstill: StoodStill | None = None  # requests are open, and no step runs; by the clock of this process
    replicas: tuple[ServiceState, ...] = ()  # of a service over several engines

    @property
    def engines(self) -> tuple[ServiceState, ...]:
        """Every engine of the service, by number."""
        return self.replicas or (self,)

    def as_starting(self) -> ServiceState:
        """The same service while it may not be used yet, though its engines may be ready."""
        engines = tuple(one.as_starting() for one in self.replicas)
        is_up = self.phase is ServicePhase.READY
        return replace(self, phase=ServicePhase.STARTING, capacity=None, replicas=engines) if is_up else self


class Service(Protocol):
    """Every message gets its answer, whatever happens to the engine.

    A `Request` ends in exactly one `Finished`. An `AddAdapter` ends in `AdapterAdded` or `AdapterRefused`. A
    `RemoveAdapter` ends in `AdapterRemoved`, or in `AdapterRefused` if the adapter was not known.
    """

    @property
    def state(self) -> ServiceState: ...

    def start(self, deliver: Deliver) -> None:
        """Begin, without waiting. `deliver` is called with batches of events, by one thread at a time."""
        ...

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        """Block until requests are served; raises RotaError with the reason if they will not be."""
        ...

    def send(self, message: Message) -> None:
        """Send a message, from any thread, without blocking; raises RequestError if the service is down."""
        ...

    def stop(self) -> None:
        """End within seconds and abort open requests; blocks until that is done."""
        ...


class StateBoard:
    """The current state, for threads that read it and threads that wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.state = ServiceState(phase=ServicePhase.STARTING)  # for readers; `set` changes it

    def set(self, state: ServiceState) -> None:
        with self._changed:
            has_served = self.state.has_served or state.phase is ServicePhase.READY
            start, restart = state.start or self.state.start, state.restart or self.state.restart
            self.state = replace(state, has_served=has_served, start=start, restart=restart)
            self._changed.notify_all()

    def note_events(self, events: list[Event]) -> None:
        """An engine that serves tells whether it stands still."""
        for event in events:
            if isinstance(event, StoodStill):
                now = time.monotonic()  # an engine on another machine has another clock
                self.set(replace(self.state, standstill=replace(event, at=now, since=now - event.still_s)))
            elif isinstance(event, WentOn):
                self.set(replace(self.state, standstill=None))

    def wait_until_ready(self, timeout_s: float | None) -> Capacity:
        with self._changed:
            self._changed.wait_for(lambda: self.state.phase is not ServicePhase.STARTING, timeout_s)
            state = self.state
        if state.phase is ServicePhase.DOWN:
            raise EngineDiedError(state.reason)
        if state.capacity is None:
            raise EngineDiedError(f"The engine is still starting after {timeout_s} seconds.")
        return state.capacity


def refuse(reason: str) -> RequestError:
    """What `send` raises when no engine would answer."""
    return RequestError(Fault(FaultCode.ENGINE_DIED, reason))


class EngineService:
    """What a service of one engine has, wherever that runs: its state, and what it owes."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._board = StateBoard()
        # Guards open requests together with their engine: a request belongs to one engine process only. The garbage
        # collector may close a stream of tokens in the middle of that, which sends an abort.
        self._lock = threading.RLock()
        self._promises = Promises(config.engine_id)

    @property
    def state(self) -> ServiceState:
        return self._board.state

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        return self._board.wait_until_ready(timeout_s)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def _refuse_when_down(self) -> None:
        if self.state.phase is ServicePhase.DOWN:
            raise refuse(self.state.reason)

    def _on_events(self, events: list[Event]) -> None:
        with self._lock:
            self._promises.note_events(events)
        self._board.note_events(events)
        self._deliver(events)

    def _go_down(self, reason: str) -> None:
        with self._lock:
            self._board.set(ServiceState(phase=ServicePhase.DOWN, reason=reason))
            failed = self._promises.break_all(reason)
        self._deliver(failed)  # if nothing failed too: the state has changed


def explain(error: Exception) -> str:
    """One sentence about an error that ends an engine; an error that is not Rota's own is printed with its trace."""
    if isinstance(error, RotaError):
        return str(error)
    sys.excepthook(type(error), error, error.__traceback__)  # on stderr, or in the log if stderr goes there
    return f"The engine failed with {type(error).__name__}: {error}"


def is_own(error: Exception) -> bool:
    """Whether an error may be due to what the engine read: lack of memory and the loss of another rank are not."""
    seen: BaseException | None = error
    while seen is not None:
        names = {kind.__name__ for kind in type(seen).__mro__}
        is_short = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        if is_short or names & {"MemoryError", "OutOfMemoryError", "EngineDiedError"} or _SHORTAGE.search(str(seen)):
            return False
        seen = seen.__cause__ or seen.__context__
    return True
