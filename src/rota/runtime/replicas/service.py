"""A replicated service is one service over several engines: the server does not know how many there are."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from operator import is_

from rota.core.config import Capacity
from rota.core.errors import EngineDiedError
from rota.core.events import Event
from rota.core.messages import Message
from rota.runtime.replicas.desk import ReplicaDesk
from rota.runtime.replicas.states import joint_state
from rota.runtime.routing.router import Router
from rota.runtime.service import Deliver, Phase, Service, ServiceState, refuse

# How often a start looks whether all replicas are ready.
LOOK_S = 0.05


class ReplicatedService:
    """Each request goes to one replica, and ends with it. Adapters are those of all replicas.

    There are two locks, taken in this order. `_turn` lets one replica's thread at a time deliver events, so that they
    arrive in the order in which the desk noted them. `_lock` guards the desk; `send` takes it too, and so never waits
    for a delivery. A replica has a lock of its own, and does not hold it while it delivers.
    """

    def __init__(self, replicas: Sequence[Service], router: Router | None = None) -> None:
        self._replicas = replicas
        self._desk = ReplicaDesk(replicas, router or Router(len(replicas)))
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        states = tuple(replica.state for replica in replicas)
        self._joint = (states, joint_state(states))

    @property
    def state(self) -> ServiceState:
        states = tuple(replica.state for replica in self._replicas)
        seen, joint = self._joint
        # A state is made anew when it changes. To join sixteen takes longer than to route a request.
        if not all(map(is_, states, seen)):
            joint = joint_state(states)
            self._joint = (states, joint)
        return joint

    def wait_until_ready(self, timeout_s: float | None = None) -> Capacity:
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # Any replica may be the one that fails, so to wait for one after the other would be too long.
        while (state := self.state).phase is Phase.STARTING and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
        if state.phase is Phase.DOWN:
            raise EngineDiedError(state.reason)
        if state.capacity is None:
            raise EngineDiedError(f"Not all replicas are ready after {timeout_s} seconds.")
        return state.capacity

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        for number, replica in enumerate(self._replicas):
            replica.start(partial(self._on_events, number))

    def send(self, message: Message) -> None:
        with self._lock:
            if (state := self.state).phase is Phase.DOWN:
                raise refuse(state.reason)
            events = self._desk.send(message)
        if events:  # it was answered without a replica
            with self._turn:
                self._deliver(events)

    def stop(self) -> None:
        """Stop all replicas at once: each of them may need seconds."""
        with self._turn:
            with self._lock:
                events = self._desk.close()
            if events:
                self._deliver(events)
        stops = [threading.Thread(target=replica.stop, name="rota-stop", daemon=True) for replica in self._replicas]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()

    def _on_events(self, replica: int, events: list[Event]) -> None:
        with self._turn:
            with self._lock:
                told = self._desk.note(replica, events)
            if told:
                self._deliver(told)
