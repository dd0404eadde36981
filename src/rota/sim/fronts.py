"""Fronts share a fleet: each has the router of its own replicas, and a balancer above them chooses the front.

One front per group of replicas is how a fleet looks to a platform: every pod is a server with some replicas.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol, get_args
from zlib import crc32

from rota.core.events import Event
from rota.core.ids import AdapterId, RequestId
from rota.core.request import Request
from rota.policy.routing import Choice, RouteReason
from rota.runtime.routing.router import Router
from rota.sim.picker import Picker

Balancer = Literal["random", "adapter", "picker"]
BALANCERS: tuple[Balancer, ...] = get_args(Balancer)


class FleetRouter(Protocol):
    """What sends requests to a fleet's replicas: one router, or several fronts."""

    @property
    def routed(self) -> Counter[tuple[int, RouteReason]]: ...

    def route(self, request: Request, _now: float) -> Choice: ...

    def replica_of(self, request_id: RequestId) -> int | None: ...

    def note_events(self, replica: int, events: Sequence[Event]) -> None: ...


class Fronts:
    """As many routers as fronts, each with the same number of replicas, in order.

    The balancer is one that knows nothing (`random`), one that goes by the adapter's name alone (`adapter`), or the
    endpoint picker, which goes by what fronts have told of themselves.
    """

    def __init__(self, routers: Sequence[Router], replicas: int, balancer: Balancer, slots: int, seed: int = 0) -> None:
        self._routers = routers
        self._each = replicas // len(routers)
        self._balancer = balancer
        self._dice = random.Random(f"fronts {seed}")
        self._picker = Picker(len(routers), self._each * slots, self._dice) if balancer == "picker" else None
        self._front_of: dict[RequestId, int] = {}  # of open requests

    @property
    def routed(self) -> Counter[tuple[int, RouteReason]]:
        found: Counter[tuple[int, RouteReason]] = Counter()
        for front, router in enumerate(self._routers):
            for (replica, reason), count in router.routed.items():
                found[front * self._each + replica, reason] += count
        return found

    def route(self, request: Request, now: float) -> Choice:
        front = self._front(request.adapter_id, now)
        if self._picker:
            self._picker.asked(front, request)
        self._front_of[request.request_id] = front
        choice = self._routers[front].route(request, now)
        return Choice(front * self._each + choice.replica, choice.reason)

    def replica_of(self, request_id: RequestId) -> int | None:
        front = self._front_of.get(request_id)
        found = None if front is None else self._routers[front].replica_of(request_id)
        return None if front is None or found is None else front * self._each + found

    def note_events(self, replica: int, events: Sequence[Event]) -> None:
        front, own = divmod(replica, self._each)
        self._routers[front].note_events(own, events)
        if self._picker:
            self._picker.observe(front, events)

    def _front(self, adapter_id: AdapterId, now: float) -> int:
        if self._picker:
            return self._picker.pick(adapter_id, now)
        if self._balancer == "random":
            return self._dice.randrange(len(self._routers))
        return crc32(b"%d" % adapter_id) % len(self._routers)
