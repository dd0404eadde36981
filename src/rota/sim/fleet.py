"""A fleet is several replicas in one virtual time, behind the router that serves them live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rota.core.events import Event
from rota.core.messages import Abort, Message, Submit
from rota.core.plan import StepResult
from rota.runtime.loop import Emit, run
from rota.runtime.router import Router
from rota.scheduler import Scheduler
from rota.sim.baton import Baton
from rota.sim.cost import CostModel
from rota.sim.mail import Mail
from rota.sim.replica_results import ReplicaResults
from rota.sim.world import Finish, VirtualWorld


class ReplicaWorld(VirtualWorld):
    """One replica's world: where it would jump ahead, it first lets the others come as far."""

    def __init__(self, baton: Baton, costs: CostModel, fetch_s: float) -> None:
        super().__init__((), costs, fetch_s=fetch_s)
        self._baton = baton
        self._until = 0.0
        self._step: Finish | None = None  # while the loop waits for a step

    @property
    def due_at(self) -> float:
        if self._step is not None:
            return max(self._now, self._step[0])
        return max(self._now, min(self.next_at, self._until))

    def receive(self, until: float) -> list[Message] | None:
        self._until = until
        self._baton.wait(self)
        return super().receive(until)

    def collect(self, ticket: Finish) -> StepResult:
        self._step = ticket
        self._baton.wait(self)
        self._step = None
        return super().collect(ticket)


class Fleet:
    """Replicas with their schedulers and worlds; `mail` is what clients send to all of them together.

    A request goes to the replica that the router chooses when the request arrives. The router knows every event at
    once. What is about an adapter goes to all replicas.
    """

    def __init__(self, mail: Mail, router: Router, costs: CostModel, fetch_s: float) -> None:
        self._mail = mail
        self._router = router
        self._costs = costs
        self._fetch_s = fetch_s
        self._baton = Baton(self._deliver)
        self._worlds: list[ReplicaWorld] = []
        self.results: list[ReplicaResults] = []  # of each replica

    def run(self, schedulers: Sequence[Scheduler], emit: Emit, depth: int, starts_at: float) -> None:
        """Serve until all mail is answered; `emit` gets the events of all replicas. Clients begin at `starts_at`."""
        self._worlds = [ReplicaWorld(self._baton, self._costs, self._fetch_s) for _ in schedulers]
        self.results = [ReplicaResults(starts_at) for _ in schedulers]
        loops: list[Callable[[], None]] = [
            partial(run, scheduler, world, partial(self._emit, number, emit), depth)
            for number, (scheduler, world) in enumerate(zip(schedulers, self._worlds, strict=True))
        ]
        self._baton.run(self._worlds, loops)

    def _deliver(self, by: float) -> bool:
        """Give the replicas the messages of the next moment, if that is not later; False if there are none."""
        at = self._mail.next_at
        if at > by or at == math.inf:
            return False
        for message in self._mail.take(at):
            for number in self._receivers(message, at):
                self._worlds[number].post(at, message)
        return True

    def _receivers(self, message: Message, at: float) -> Sequence[int]:
        if isinstance(message, Submit):
            request = message.request
            number = self._router.route(request, at).replica
            self.results[number].recorder.asked(request.request_id, request.adapter_id, at - self._costs.front_s)
            return (number,)
        if isinstance(message, Abort):
            found = self._router.replica_of(message.request_id)
            return () if found is None else (found,)
        return range(len(self._worlds))

    def _emit(self, number: int, emit: Emit, events: list[Event]) -> None:
        self._router.note_events(number, events)
        self.results[number].observe(events)
        emit(events)
