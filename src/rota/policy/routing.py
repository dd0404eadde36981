"""Routing says which replica takes a request: the one where the request costs least, in seconds.

A replica's price is the time that the request would lose there: behind the work that is open, for its adapter's weights
and turns, and less what the replica has cached of its prompt. So a replica that holds the adapter takes the request
unless its queue is longer by more than a load costs, and an adapter that is too hot for its holders gets another.

`route` is the rule as it is meant. `runtime/replicas/replica_state.py` follows it for many replicas at once, and a test
holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

# A load pushes another adapter out of a slot, and a read pushes one out of host memory. Most often the other adapter is
# asked for again, so each is paid for twice.
TO_AND_FRO = 2.0


class RouteReason(StrEnum):
    """Why a request went to its replica."""

    ONLY_ONE = "no other replica is up"
    IN_SLOT = "the replica holds the adapter in a slot"
    HOLDERS_BUSY = "the replicas that hold the adapter are too busy"
    IN_HOST_MEMORY = "the replica holds the adapter in host memory"
    CACHED_PREFIX = "the replica has computed the beginning of the prompt before"
    SHORTEST_QUEUE = "the replica has the shortest queue"
    LOWEST_NUMBER = "the replicas are alike, and this one has the lowest number"
    IN_TURN = "requests go to the replicas in turn"


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """One replica as one request sees it.

    A view is not frozen: a router writes into the same views all the time, since sixteen new ones would take 40 µs.
    """

    number: int
    is_up: bool = True
    queue_s: float = 0.0  # what the work that is open there adds to a request
    pause_s: float = 0.0  # how long the answer would pause there for the turns of other adapters
    has_slot: bool = False  # the adapter is in a slot there, or has requests there and so has its turns
    has_host_copy: bool = False
    prefix_tokens: int = 0  # of the prompt, those that the replica has computed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a replica pays for what it lacks, in seconds, as measured."""

    load_s: float  # an adapter's way from host memory into a slot
    fetch_s: float  # an adapter's way from disk into host memory
    token_s: float  # a prompt token that is not cached


@dataclass(frozen=True, slots=True)
class RoutingChoice:
    """The replica that takes a request, and why."""

    replica: int
    reason: RouteReason


def route(views: Sequence[ReplicaView], prices: Prices, needs_adapter: bool = True) -> RoutingChoice | None:
    """The replica with the lowest price, of equal ones the lowest number; None if no replica is up.

    A request for the base model pays for no adapter.
    """
    token_s = prices.token_s
    load_s = TO_AND_FRO * prices.load_s
    absent_s = load_s + TO_AND_FRO * prices.fetch_s
    best, best_s, is_alone = None, 0.0, True
    for view in views:
        if not view.is_up:
            continue
        price_s = view.queue_s - view.prefix_tokens * token_s
        if needs_adapter:
            price_s += view.pause_s
            if not view.has_slot:
                price_s += load_s if view.has_host_copy else absent_s
        if best is None:
            best, best_s = view, price_s
            continue
        is_alone = False
        if price_s < best_s:
            best, best_s = view, price_s
    if best is None:
        return None
    return RoutingChoice(best.number, RouteReason.ONLY_ONE if is_alone else _reason(views, best, needs_adapter))


def shortest_queue(views: Sequence[ReplicaView]) -> RoutingChoice | None:
    """The replica with the shortest queue, whatever it holds."""
    up = [view for view in views if view.is_up]
    if not up:
        return None
    best = min(up, key=lambda view: (view.queue_s, view.number))
    return RoutingChoice(best.number, RouteReason.ONLY_ONE if len(up) == 1 else _by_queue(up, best))


def in_turn(views: Sequence[ReplicaView], before: int) -> RoutingChoice | None:
    """The next replica that is up, behind the one that took the request before."""
    for step in range(1, len(views) + 1):
        view = views[(before + step) % len(views)]
        if view.is_up:
            return RoutingChoice(view.number, RouteReason.IN_TURN)
    return None


def _reason(views: Sequence[ReplicaView], best: ReplicaView, needs_adapter: bool) -> RouteReason:
    if needs_adapter:
        if best.has_slot:
            return RouteReason.IN_SLOT
        if any(view.has_slot and view.is_up for view in views):
            return RouteReason.HOLDERS_BUSY
        if best.has_host_copy:
            return RouteReason.IN_HOST_MEMORY
        if any(view.has_host_copy and view.is_up for view in views):
            return RouteReason.HOLDERS_BUSY
    return RouteReason.CACHED_PREFIX if best.prefix_tokens else _by_queue(views, best)


def _by_queue(views: Sequence[ReplicaView], best: ReplicaView) -> RouteReason:
    is_shortest = all(view.queue_s > best.queue_s for view in views if view.is_up and view is not best)
    return RouteReason.SHORTEST_QUEUE if is_shortest else RouteReason.LOWEST_NUMBER
