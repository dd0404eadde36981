"""Routing says which replica takes a request: the one where the request costs least, in seconds.

A replica's price is the time that the request would wait there: for what is open before it, for its adapter, and for
the part of its prompt that is not cached. So a replica that holds the adapter takes the request unless its queue is
longer by more than a load costs, and an adapter that is too hot for its holders gets another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class RouteReason(StrEnum):
    """Why a request went to its replica."""

    ONLY_ONE = "no other replica is up"
    IN_SLOT = "the replica holds the adapter in a slot"
    HOLDERS_BUSY = "the replicas that hold the adapter have longer queues than a load is worth"
    IN_HOST_MEMORY = "the replica holds the adapter in host memory"
    CACHED_PREFIX = "the replica has computed the beginning of the prompt before"
    SHORTEST_QUEUE = "the replica has the shortest queue"
    LOWEST_NUMBER = "the replicas are alike, and this one has the lowest number"
    IN_TURN = "requests go to the replicas in turn"


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """One replica as one request sees it.

    It is not frozen, because a router fills the same views for every request: sixteen new ones would take 40 µs.
    """

    number: int
    is_up: bool = True
    queue_s: float = 0.0  # how long the work that is open on the replica takes
    has_slot: bool = False  # the adapter is in a slot there, or on its way there
    has_host_copy: bool = False
    prefix_tokens: int = 0  # of the prompt, those that the replica has computed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a replica pays for what it lacks, in seconds, as measured."""

    load_s: float  # an adapter's way from host memory into a slot
    fetch_s: float  # an adapter's way from disk into host memory
    token_s: float  # a prompt token that is not cached


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica that takes a request, and why."""

    replica: int
    reason: RouteReason


def route(views: Sequence[ReplicaView], prices: Prices, needs_adapter: bool = True) -> Choice | None:
    """The replica with the lowest price, of equal ones the lowest number; None if no replica is up."""
    load_s, token_s = (prices.load_s, prices.token_s) if needs_adapter else (0.0, prices.token_s)
    absent_s = load_s + prices.fetch_s if needs_adapter else 0.0
    best, best_s = None, 0.0
    for view in views:
        if not view.is_up:
            continue
        price_s = view.queue_s - view.prefix_tokens * token_s
        if not view.has_slot:
            price_s += load_s if view.has_host_copy else absent_s
        if best is None or price_s < best_s:
            best, best_s = view, price_s
    return None if best is None else Choice(best.number, _reason(views, best, needs_adapter))


def shortest_queue(views: Sequence[ReplicaView]) -> Choice | None:
    """The replica with the least open work, whatever it holds."""
    up = [view for view in views if view.is_up]
    if not up:
        return None
    best = min(up, key=lambda view: (view.queue_s, view.number))
    return Choice(best.number, _by_queue(up, best))


def in_turn(views: Sequence[ReplicaView], before: int) -> Choice | None:
    """The next replica that is up, behind the one that took the request before."""
    for step in range(1, len(views) + 1):
        view = views[(before + step) % len(views)]
        if view.is_up:
            return Choice(view.number, RouteReason.IN_TURN)
    return None


def _reason(views: Sequence[ReplicaView], best: ReplicaView, needs_adapter: bool) -> RouteReason:
    up = [view for view in views if view.is_up]
    if len(up) == 1:
        return RouteReason.ONLY_ONE
    if needs_adapter:
        if best.has_slot:
            return RouteReason.IN_SLOT
        if any(view.has_slot for view in up):
            return RouteReason.HOLDERS_BUSY
        if best.has_host_copy:
            return RouteReason.IN_HOST_MEMORY
        if any(view.has_host_copy for view in up):
            return RouteReason.HOLDERS_BUSY
    if best.prefix_tokens:
        return RouteReason.CACHED_PREFIX
    return _by_queue(up, best)


def _by_queue(up: Sequence[ReplicaView], best: ReplicaView) -> RouteReason:
    if len(up) == 1:
        return RouteReason.ONLY_ONE
    is_shortest = all(view.queue_s > best.queue_s for view in up if view is not best)
    return RouteReason.SHORTEST_QUEUE if is_shortest else RouteReason.LOWEST_NUMBER
