"""Fronts share a fleet: each has the router of its own replicas, and a balancer above them chooses the front.

One front per group of replicas is how a fleet looks to a platform: every pod is a server with some replicas.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args
from zlib import crc32

from rota.core.events import Admitted, Event, Finished, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId, EngineId, RequestId, Slot
from rota.core.request import Request
from rota.policy.routing import RouteReason, RoutingChoice
from rota.runtime.replicas.face import Router

# ── picker ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# The picker chooses a front as a platform's endpoint picker does: by scores of what fronts told at the last scrape.
#
# The scores are those of its documents: an adapter's place (ready in a slot 1.0, a free slot 0.8, waiting 0.6, else 0),
# and how short the queue is, between the longest (0) and the shortest (1). Both weigh the same, and chance breaks ties.

SCRAPE_S = 0.05


@dataclass(slots=True, kw_only=True)
class FrontFigures:
    """One front: what is so now, and what the last scrape has told."""

    ready: dict[tuple[EngineId, Slot], AdapterId] = field(default_factory=dict)
    waiting: dict[RequestId, AdapterId] = field(default_factory=dict)
    told_ready: frozenset[AdapterId] = frozenset()
    told_waiting: frozenset[AdapterId] = frozenset()
    told_queue: int = 0

    def tell(self) -> None:
        self.told_ready = frozenset(self.ready.values())
        self.told_waiting = frozenset(self.waiting.values()) - {BASE}
        self.told_queue = len(self.waiting)

    def place_score(self, adapter_id: AdapterId, slots: int) -> float:
        if adapter_id in self.told_ready:
            return 1.0
        if len(self.told_ready) + len(self.told_waiting) < slots:
            return 0.8
        return 0.6 if adapter_id in self.told_waiting else 0.0


class Picker:
    """`slots` are those of one front."""

    def __init__(self, fronts: int, slots: int, dice: random.Random) -> None:
        self._fronts = [FrontFigures() for _ in range(fronts)]
        self._slots = slots
        self._dice = dice
        self._scraped_at = 0.0

    def pick(self, adapter_id: AdapterId, now: float) -> int:
        if now >= self._scraped_at + SCRAPE_S:
            self._scraped_at = now
            for front in self._fronts:
                front.tell()
        scores = [self._score(front, adapter_id) for front in self._fronts]
        best = max(scores)
        return self._dice.choice([number for number, score in enumerate(scores) if score == best])

    def asked(self, front: int, request: Request) -> None:
        self._fronts[front].waiting[request.request_id] = request.adapter_id

    def observe(self, front: int, events: Sequence[Event]) -> None:
        figures = self._fronts[front]
        for event in events:
            if isinstance(event, Admitted | Finished):
                figures.waiting.pop(event.request_id, None)
            elif isinstance(event, SlotChanged):
                figures.ready.pop((event.engine_id, event.slot), None)
                if event.state is SlotState.READY:
                    figures.ready[event.engine_id, event.slot] = event.adapter_id

    def _score(self, front: FrontFigures, adapter_id: AdapterId) -> float:
        queues = [one.told_queue for one in self._fronts]
        shortest, longest = min(queues), max(queues)
        queue_score = (longest - front.told_queue) / (longest - shortest) if longest > shortest else 1.0
        return queue_score + (0.0 if adapter_id == BASE else front.place_score(adapter_id, self._slots))


Balancer = Literal["random", "adapter", "picker"]
BALANCERS: tuple[Balancer, ...] = get_args(Balancer)


class FleetRouter(Protocol):
    """What sends requests to a fleet's replicas: one router, or several fronts."""

    @property
    def routed(self) -> Counter[tuple[int, RouteReason]]: ...

    def route(self, request: Request, _now: float) -> RoutingChoice: ...

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

    @property
    def routed(self) -> Counter[tuple[int, RouteReason]]:
        found: Counter[tuple[int, RouteReason]] = Counter()
        for front, router in enumerate(self._routers):
            for (replica, reason), count in router.routed.items():
                found[front * self._each + replica, reason] += count
        return found

    def route(self, request: Request, now: float) -> RoutingChoice:
        front = self._front(request.adapter_id, now)
        if self._picker:
            self._picker.asked(front, request)
        choice = self._routers[front].route(request, now)
        return RoutingChoice(front * self._each + choice.replica, choice.reason)

    def replica_of(self, request_id: RequestId) -> int | None:
        for front, router in enumerate(self._routers):
            if (found := router.replica_of(request_id)) is not None:
                return front * self._each + found
        return None

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
