"""The picker chooses a front as a platform's endpoint picker does: by scores of what fronts told at the last scrape.

The scores are those of its documents: an adapter's place (ready in a slot 1.0, a free slot 0.8, waiting 0.6, else 0),
and how short the queue is, between the longest (0) and the shortest (1). Both weigh the same, and chance breaks ties.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rota.core.events import Admitted, Event, Finished, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId, EngineId, RequestId, Slot
from rota.core.request import Request

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
