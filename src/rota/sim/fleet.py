"""A fleet is several replicas in one virtual time, behind the router that serves them live."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from rota.core.events import Event, Finished
from rota.core.messages import Abort, AddAdapter, Message, ServedElsewhere, Submit
from rota.runtime.loop import Emit, run
from rota.runtime.replicas.tenant_quotas import TenantQuotas
from rota.scheduler import Scheduler
from rota.sim.baton import Baton
from rota.sim.cost import CostModel
from rota.sim.exchanges import Board, Gathering
from rota.sim.first_asks import FirstAsks
from rota.sim.fronts import FleetRouter
from rota.sim.mail import Mail
from rota.sim.replica_results import ReplicaResults
from rota.sim.replica_world import ReplicaWorld
from rota.sim.world import PagesOf


class Fleet:
    """Replicas with their schedulers and worlds; `mail` is what clients send to all of them together.

    A request goes to the replica that the router chooses when the request arrives. The router knows every event at
    once. What is about an adapter goes to all replicas.
    """

    def __init__(
        self,
        mail: Mail,
        router: FleetRouter,
        replicas: int,
        costs: CostModel,
        fetch_s: float,
        gathers: bool | None = None,
        adds_on_demand: bool = False,
        pages_of: PagesOf | None = None,
    ) -> None:
        """`gathers` is about the replicas' prefill delayers: whether they wait for each other; None: there are none.

        `adds_on_demand`: a replica hears of an adapter with the first request for it that goes there.
        """
        self._mail = mail
        self._first_asks = FirstAsks() if adds_on_demand else None
        self._router = router
        self._quotas = TenantQuotas()
        self._front_s = costs.front_s
        self._baton = Baton(self._deliver)
        exchange = None if gathers is None else Gathering(replicas) if gathers else Board()
        self.worlds = [
            ReplicaWorld(number, self._baton, costs, fetch_s, exchange, pages_of) for number in range(replicas)
        ]
        self.results: list[ReplicaResults] = []  # of each replica

    def run(self, schedulers: Sequence[Scheduler], emit: Emit, depth: int, starts_at: float) -> None:
        """Serve until all mail is answered; `emit` gets the events of all replicas. Clients begin at `starts_at`."""
        self.results = [ReplicaResults(since=starts_at) for _ in schedulers]
        loops: list[Callable[[], None]] = [
            partial(run, scheduler, world, partial(self._emit, number, emit), depth)
            for number, (scheduler, world) in enumerate(zip(schedulers, self.worlds, strict=True))
        ]
        self._baton.run(self.worlds, loops)

    def _deliver(self, by: float) -> bool:
        """Give the replicas the messages of the next moment, if that is not later; False if there are none."""
        at = self._mail.next_at
        if at > by or at == math.inf:
            return False
        for message in self._mail.take(at):
            if self._first_asks is not None and isinstance(message, AddAdapter):
                self._first_asks.expect(message)
                continue
            for number in self._receivers(message, at):
                self.worlds[number].post(at, message)
        return True

    def _receivers(self, message: Message, at: float) -> Sequence[int]:
        if isinstance(message, Submit):
            request = message.request
            number = self._router.route(request, at).replica
            self._quotas.send(request, number)
            self.results[number].recorder.asked(request.request_id, request.adapter_id, at - self._front_s)
            if self._first_asks is not None and (added := self._first_asks.note(number, request.adapter_id, at)):
                self.worlds[number].post(at, added)
            return (number,)
        if isinstance(message, Abort):
            found = self._router.replica_of(message.request_id)
            return () if found is None else (found,)
        return range(len(self.worlds))

    def _emit(self, number: int, emit: Emit, events: list[Event]) -> None:
        self._router.note_events(number, events)
        for event in events:
            if isinstance(event, Finished):
                self._end(number, event)
        self.results[number].observe(events)
        emit(events)

    def _end(self, number: int, event: Finished) -> None:
        """What a tenant got here counts as service on other replicas where it has requests, as it does live."""
        tenant, others = self._quotas.others_of(event.request_id, number)
        served = ServedElsewhere(tenant, event.prompt_tokens - event.cached_tokens, event.output_tokens)
        for other in () if event.fault else others:
            self.worlds[other].post(event.at, served)
        self._quotas.end(event.request_id)
