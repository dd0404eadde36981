"""A replicated service is one service over several engines: the server does not know how many there are."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial

from rota.core.capacity import Capacity
from rota.core.errors import EngineDiedError
from rota.core.events import Event
from rota.core.messages import Message
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.roster import Roster
from rota.runtime.replicas.router import Router
from rota.runtime.service import Deliver, Service, ServicePhase, ServiceState, refuse

# How often a start looks whether all replicas are ready.
LOOK_S = 0.05


class ReplicatedService:
    """Each request goes to one replica, and ends with it. Adapters are those of all replicas.

    There is at least one replica from the start, and `add` brings more at any time. A replica's number is the engine_id
    in its events.

    There are two locks, taken in this order. `_turn` lets one replica's thread at a time deliver events, so that they
    arrive in the order in which the desk noted them. `_lock` guards the desk; `send` takes it too, and so never waits
    for a delivery. A replica has a lock of its own, and does not hold it while it delivers.
    """

    def __init__(self, replicas: Sequence[Service], router: Router | None = None) -> None:
        self._roster = Roster(replicas)
        self._desk = ReplicaDesk(self._roster, router or Router(len(replicas)))
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._deliver: Deliver | None = None
        self._is_stopped = False

    def __len__(self) -> int:
        """How many replicas there are, and so the number of the next."""
        return len(self._roster)

    @property
    def state(self) -> ServiceState:
        return self._roster.look()

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # Any replica may be the one that fails, so to wait for one after the other would be too long.
        while (state := self.state).phase is ServicePhase.STARTING and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
        if state.phase is ServicePhase.DOWN:
            raise EngineDiedError(state.reason)
        if state.capacity is None:
            raise EngineDiedError(f"Not all replicas are ready after {timeout_s} seconds.")
        return state.capacity

    def start(self, deliver: Deliver) -> None:
        with self._lock:
            self._deliver = deliver
            for number in range(len(self._roster)):
                self._roster[number].start(partial(self._on_events, number))

    def add(self, replica: Service) -> int:
        """A replica joins while the others serve, from any thread; gives its number, which was `len` of the service.

        It is started here and told of all adapters, and takes requests once it is ready. Until then the service is as
        ready as without it; if the replica cannot start, it stays down and the others go on. Raises RequestError if the
        service was stopped.
        """
        with self._lock:
            if self._is_stopped or self._deliver is None:
                raise refuse("Replicas join a service that was started and not stopped.")
            replica.start(partial(self._on_events, len(self._roster)))  # its first events wait for the lock
            return self._desk.add(replica)

    def send(self, message: Message) -> None:
        with self._lock:
            events = self._desk.send(message)
        if events:  # it was answered without a replica
            with self._turn:
                self._tell(events)

    def stop(self) -> None:
        """Stop all replicas at once: each of them may need seconds."""
        with self._turn:
            with self._lock:
                self._is_stopped = True
                events = self._desk.close()
            self._tell(events)
        replicas = [self._roster[number] for number in range(len(self._roster))]
        stops = [threading.Thread(target=replica.stop, name="rota-stop", daemon=True) for replica in replicas]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()

    def _on_events(self, replica: int, events: list[Event]) -> None:
        with self._turn:
            with self._lock:
                told = self._desk.note(replica, events)
            self._tell(told)

    def _tell(self, events: list[Event]) -> None:
        if events and self._deliver:
            self._deliver(events)
