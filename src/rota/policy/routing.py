"""Routing says which replica takes a request: the one where the request costs least, in seconds.

A replica's price is the time that the request would lose there: behind the work that is open, for its adapter's weights
and turns, and less what the replica has cached of its prompt. So a replica that holds the adapter takes the request
unless its queue is longer by more than a load costs, and an adapter that is too hot for its holders gets another.

`runtime/replicas/replica_state.py` works the prices out for many replicas at once.
"""

from __future__ import annotations

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
