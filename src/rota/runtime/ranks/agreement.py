"""Ranks agree on adapters: what the scheduler hears of an adapter is what all ranks have said.

Rank 0 may have read an adapter that another rank cannot read, and its own copy into a slot says nothing of the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from rota.core.ids import AdapterId
from rota.core.messages import AdapterFailed, AdapterFetched, AdapterReady, Message
from rota.core.plan import StepPlan

Outcome = AdapterFetched | AdapterReady | AdapterFailed
Post = Callable[[Message], None]


@dataclass(slots=True)
class Order:
    """An adapter is to be read, or copied into a slot, by every rank."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    is_told: bool = False

    @property
    def failures(self) -> list[tuple[int, AdapterFailed]]:
        return [(rank, said) for rank, said in sorted(self.outcomes.items()) if isinstance(said, AdapterFailed)]


class Agreement:
    """Each order ends in one message, once every rank has said how its own part ended; from any thread."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._lock = threading.Lock()
        self._post: Post | None = None
        self._reads: dict[AdapterId, deque[Order]] = {}
        self._copies: dict[AdapterId, deque[Order]] = {}
        self._to_forget: list[AdapterId] = []

    def listen(self, post: Post) -> None:
        """Tell what was agreed through `post`; it replaces the one given before."""
        self._post = post

    def order(self, plan: StepPlan) -> StepPlan:
        """Expect the outcomes of a plan, before any rank has the plan; gives the plan with what must be forgotten."""
        with self._lock:
            for adapter in plan.reads:
                self._reads.setdefault(adapter.adapter_id, deque()).append(Order())
            for load in plan.loads:
                self._copies.setdefault(load.adapter_id, deque()).append(Order())
            forgotten, self._to_forget = self._to_forget, []
        return replace(plan, drops=(*plan.drops, *forgotten)) if forgotten else plan

    def note(self, rank: int, message: Message) -> None:
        """A rank has done its part of an order, or could not. A rank's outcomes come in the order of its orders."""
        assert isinstance(message, Outcome), "a device tells only of adapters"
        with self._lock:
            for orders in self._kinds(message):
                waiting = orders.get(message.adapter_id, ())
                if order := next((order for order in waiting if rank not in order.outcomes), None):
                    order.outcomes[rank] = message
                    return self._settle(orders, message.adapter_id, order)

    def _kinds(self, message: Outcome) -> Iterable[dict[AdapterId, deque[Order]]]:
        """Which orders a message may be of. A failure is that of a read if a read is under way."""
        match message:
            case AdapterFetched():
                return (self._reads,)
            case AdapterReady():
                return (self._copies,)
            case AdapterFailed():
                return (self._reads, self._copies)

    def _settle(self, orders: dict[AdapterId, deque[Order]], adapter_id: AdapterId, order: Order) -> None:
        is_complete = order.outcomes.keys() == self._ranks
        if is_complete:
            orders[adapter_id].popleft()  # each rank speaks in order, so the oldest order is the first to be complete
            if not orders[adapter_id]:
                del orders[adapter_id]
        if is_complete and orders is self._reads and 0 < len(order.failures) < len(self._ranks):
            # Before the scheduler hears: the plan that orders the next read must also drop what some have read.
            self._to_forget.append(adapter_id)
        # A copy that failed is told at once: a step may have used its slot, and must not be taken for the adapter's.
        has_failed = orders is self._copies and bool(order.failures)
        if (is_complete or has_failed) and not order.is_told:
            order.is_told = True
            assert self._post is not None, "`listen` is called before the first plan"
            self._post(_agreed(order))


def _agreed(order: Order) -> Outcome:
    """The failure of the first rank that failed, or the word of the last that was ready.

    The longest copy counts, and so do the most pages.
    """
    if order.failures:
        rank, failure = order.failures[0]
        return replace(failure, reason=f"Rank {rank}: {failure.reason}") if rank else failure
    last = max(order.outcomes.values(), key=lambda outcome: outcome.at)
    if isinstance(last, AdapterReady):
        copies = (said.copy_s for said in order.outcomes.values() if isinstance(said, AdapterReady))
        return replace(last, copy_s=max(copies))
    if isinstance(last, AdapterFetched):
        reads = [one for _, one in sorted(order.outcomes.items()) if isinstance(one, AdapterFetched)]
        return replace(
            last,
            pages=max(one.pages for one in reads),
            matrices=max(one.matrices for one in reads),
            size_bytes=sum(one.size_bytes for one in reads),
            seals=tuple(seal for one in reads for seal in one.seals),
        )
    return last
