"""Adapters and slots as plain values, so that a policy can be asked without a scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

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
    most_remaining: int
    seated_in: int
    prompt_left: int
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
    most_remaining: int | None = None,
    seated_in: int = 0,
    prompt_left: int = 0,
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
        remaining if most_remaining is None else most_remaining,
        seated_in,
        prompt_left,
        ran_at,
        steps,
        slot_since,
        claims,
    )


class Absent(list[View]):
    """Has the shape of `policy.views.DueView`; a test gives it in the order of `due_at`."""

    def get(self, adapter_id: AdapterId) -> View | None:
        return next((one for one in self if one.adapter_id == adapter_id), None)


@dataclass(slots=True)
class Slots:
    """Has the shape of `policy.views.SlotsView`; every absent adapter lacks nothing but a slot."""

    residents: list[View] = field(default_factory=list)
    absent: Absent = field(default_factory=Absent)
    free: int = 0
    landings: int = 9
    step_s: float = 0.0
    step_tokens: int = 8
    has_priorities: bool = True
    being_read: frozenset[AdapterId] = frozenset()

    def may_leave(self, adapter_id: AdapterId) -> bool:
        return not next(resident for resident in self.residents if resident.adapter_id == adapter_id).is_pinned

    def is_at_hand(self, adapter_id: AdapterId) -> bool:
        return adapter_id not in self.being_read

    def is_being_read(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self.being_read

    def can_start(self, adapter_id: AdapterId) -> bool:
        return True

    def claimants(self) -> Iterator[View]:
        return iter(self.absent)
