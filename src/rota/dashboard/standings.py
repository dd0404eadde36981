"""Standings of the same adapter on several engines become one, as the page shows an adapter once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rota.core.events import AdapterStanding
from rota.core.ids import AdapterId


def merged(standings: Iterable[AdapterStanding]) -> dict[AdapterId, AdapterStanding]:
    """The sums by adapter; the reason is that of the request that has waited longest."""
    found: dict[AdapterId, AdapterStanding] = {}
    for one in standings:
        before = found.get(one.adapter_id)
        found[one.adapter_id] = _together(before, one) if before else one
    return found


def _together(one: AdapterStanding, other: AdapterStanding) -> AdapterStanding:
    waiting = [standing for standing in (one, other) if standing.oldest_at is not None]
    oldest = min(waiting, key=lambda standing: standing.oldest_at or 0.0, default=one)
    return replace(
        oldest,
        waiting=one.waiting + other.waiting,
        running=one.running + other.running,
        parked=one.parked + other.parked,
    )
