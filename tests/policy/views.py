"""Adapters as plain values, so that a policy can be asked without a scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rota.core.ids import AdapterId

A, B, C, D, E, F = map(AdapterId, range(1, 7))


@dataclass(frozen=True, slots=True)
class View:
    """Has the shape of `policy.views.AdapterView`."""

    adapter_id: AdapterId
    weight: float
    is_pinned: bool
    priority: int
    waiting: int
    oldest_at: float
    first_token_due_at: float
    running: int
    remaining: int
    ran_at: float
    steps: int
    slot_since: float
    claims: float

    def claim(self, now: float) -> float:
        return self.claims


def view(
    adapter_id: AdapterId,
    *,
    weight: float = 1.0,
    is_pinned: bool = False,
    priority: int = 0,
    waiting_since: float = math.inf,
    running: int = 0,
    remaining: int = 0,
    ran_at: float = 0.0,
    steps: int = 0,
    slot_since: float = 0.0,
    claims: float = 0.0,
) -> View:
    """An adapter of which nothing is known but what is given; `waiting_since` gives it one waiting request."""
    waiting = int(waiting_since < math.inf)
    return View(
        adapter_id,
        weight,
        is_pinned,
        priority,
        waiting,
        waiting_since,
        waiting_since,
        running,
        remaining,
        ran_at,
        steps,
        slot_since,
        claims,
    )


def views(*given: View) -> dict[AdapterId, View]:
    return {one.adapter_id: one for one in given}
