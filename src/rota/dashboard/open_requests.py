"""The open requests as the page shows them: how many of each adapter, tenant and engine, and the oldest one by one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice

from rota.core.events import Admitted, Explained, Moved, Preempted, Routed, Whereabouts
from rota.core.ids import BASE, FIRST_ENGINE, AdapterId, EngineId, RequestId

MOST_OPEN = 100_000
# Of so many that came first, so many are shown: frames are made four times a second.
MOST_LOOKED_AT, MOST_SHOWN = 2000, 20
# By engine, adapter and tenant: whether requests were admitted.
Held = tuple[EngineId, AdapterId, str, bool]
Ready = Container[tuple[EngineId, AdapterId]]
# Those that wait are shown first.
_ORDER = (Whereabouts.WAITING, Whereabouts.PARKED, Whereabouts.RUNNING)


def engine_sharer(engine: EngineId) -> Hashable:
    """What stands for an engine among adapters, whose ids are numbers too, and tenants."""
    return ("engine", engine)


@dataclass(slots=True)
class OpenRequest:
    """An open request, and the time of its last token, or of its arrival before the first token."""

    sharers: tuple[AdapterId, str]  # its adapter and its tenant
    asked_at: float
    last_at: float
    read_until: float = 0.0  # when its reader has read the text so far
    stalled_s: float = 0.0  # the longest time that this reader stood without text
    tokens: int = 0
    is_admitted: bool = False
    engine: EngineId = FIRST_ENGINE
    explained: Explained | None = None  # what its engine said last

    @property
    def held(self) -> Held:
        return self.engine, *self.sharers, self.is_admitted


def state_of(held: Held, ready: Ready) -> Whereabouts:
    """`ready` are the adapters that are in a slot: an admitted request of another one is parked."""
    engine, adapter, _, is_admitted = held
    if not is_admitted:
        return Whereabouts.WAITING
    return Whereabouts.RUNNING if adapter == BASE or (engine, adapter) in ready else Whereabouts.PARKED


class FollowedRequests:
    """Counts as requests come, are admitted, and go. So it knows who waits also while no engine answers."""

    def __init__(self) -> None:
        self._open: dict[RequestId, OpenRequest] = {}
        self._counts: Counter[Held] = Counter()
        self._queues: defaultdict[AdapterId, dict[RequestId, float]] = defaultdict(dict)  # those that wait
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._open)

    def find(self, request_id: RequestId) -> OpenRequest | None:
        return self._open.get(request_id)

    def ask(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str) -> None:
        self.end(request_id)  # a name may come again
        self._open[request_id] = OpenRequest((adapter, tenant), at, at)
        self._count(request_id, self._open[request_id], 1)
        if len(self._open) > MOST_OPEN:
            # A request that a dead engine never took gets no Finished event.
            self.end(next(iter(self._open)))

    def end(self, request_id: RequestId) -> OpenRequest | None:
        if request := self._open.pop(request_id, None):
            self._count(request_id, request, -1)
        return request

    def hear(self, event: Admitted | Preempted | Routed | Moved | Explained) -> None:
        request = self._open.get(event.request_id)
        if request is None:
            return
        if isinstance(event, Explained):
            request.explained = event
            return
        self._count(event.request_id, request, -1)
        if isinstance(event, Routed):
            request.engine = event.engine_id
        elif isinstance(event, Moved):
            request.sharers = (event.new, request.sharers[1])
        else:
            request.is_admitted, request.explained = isinstance(event, Admitted), None
        self._count(event.request_id, request, 1)

    def counted(self, ready: Ready) -> dict[Hashable, Counter[Whereabouts]]:
        """How many wait, run and are parked, of each adapter, each tenant and each engine."""
        found: defaultdict[Hashable, Counter[Whereabouts]] = defaultdict(Counter)
        for held, count in self._counts.items():
            engine, adapter, tenant, _ = held
            for sharer in (adapter, tenant, engine_sharer(engine)):
                found[sharer][state_of(held, ready)] += count
        return found

    def oldest_at(self, adapter: AdapterId) -> float | None:
        """Since when a request of an adapter waits."""
        return next(iter(self._queues[adapter].values()), None) if adapter in self._queues else None

    def shown(self, ready: Ready) -> list[tuple[RequestId, OpenRequest, Whereabouts]]:
        """Of the requests that came first, those that wait, then those that are parked, then those that run."""
        looked = islice(self._open.items(), MOST_LOOKED_AT)
        found = ((request_id, one, state_of(one.held, ready)) for request_id, one in looked)
        return nsmallest(MOST_SHOWN, found, key=lambda one: (_ORDER.index(one[2]), one[1].asked_at))

    def _count(self, request_id: RequestId, request: OpenRequest, by: int) -> None:
        adapter = request.sharers[0]
        self._counts[request.held] += by
        if not self._counts[request.held]:
            del self._counts[request.held]
        if request.is_admitted:
            return
        self.waiting += by
        if by > 0:
            self._queues[adapter][request_id] = request.asked_at
        else:
            del self._queues[adapter][request_id]
            if not self._queues[adapter]:
                del self._queues[adapter]
