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
    stands_since: float
    steps: int
    slot_since: float
    turn_steps: int
    first_arrival: float
    is_prefilling: bool
    blocks: int
    attained: int
    claims: float

    @property
    def rows(self) -> int:
        return self.running

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
    stands_since: float = math.inf,
    steps: int = 0,
    slot_since: float = 0.0,
    turn_steps: int = 0,
    is_prefilling: bool = False,
    blocks: int = 0,
    attained: int = 0,
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
        stands_since,
        steps,
        slot_since,
        turn_steps,
        waiting_since if waiting else 0.0,
        is_prefilling,
        blocks,
        attained,
        claims,
    )


class Absent(list[View]):
    """Has the shape of `policy.views.AbsentView`; a test gives it in the order of `due_at`."""

    def __contains__(self, adapter_id: object) -> bool:
        return any(one.adapter_id == adapter_id for one in self)

    def rank(self, adapter_id: AdapterId) -> int:
        return [one.adapter_id for one in self].index(adapter_id)

    def get(self, adapter_id: AdapterId) -> View | None:
        return next((one for one in self if one.adapter_id == adapter_id), None)

    @property
    def newcomers(self) -> Absent:
        found = (one for one in self if one.first_token_due_at < math.inf)
        return Absent(sorted(found, key=lambda one: (one.first_token_due_at, one.adapter_id)))

    @property
    def stalest(self) -> Absent:
        found = (one for one in self if one.running)
        return Absent(sorted(found, key=lambda one: (one.ran_at, one.adapter_id)))

    @property
    def oldest(self) -> Absent:
        return Absent(sorted(self, key=lambda one: (one.first_arrival, one.adapter_id)))

    @property
    def largest(self) -> Absent:
        return Absent(sorted(self, key=lambda one: (-one.waiting - one.running, one.adapter_id)))


@dataclass(slots=True)
class Slots:
    """Has the shape of `policy.views.SlotsView`; every absent adapter lacks nothing but a slot, unless it is named."""

    residents: list[View] = field(default_factory=list)
    absent: Absent = field(default_factory=Absent)
    free: int = 0
    copies: int = 9
    step_s: float = 0.01
    copy_s: float = 0.0
    step_tokens: int = 8
    has_priorities: bool = True
    being_read: frozenset[AdapterId] = frozenset()
    unable: frozenset[AdapterId] = frozenset()  # there are no KV and no row for their next request
    staying: frozenset[AdapterId] = frozenset()  # residents that wait for their first step, or are a tenant's last
    blocks: int = 1000
    free_blocks: int = 1000
    prompt_blocks: int = 1
    open: int = 0  # slots; 0: as many as there are residents

    @property
    def total(self) -> int:
        return self.open or max(1, len(self.residents))

    @property
    def surplus(self) -> int:
        return max(0, len(self.residents) - self.total)

    @property
    def adapter_blocks(self) -> int:
        return sum(one.blocks for one in (*self.residents, *self.absent))

    def view_of(self, adapter_id: AdapterId) -> View | None:
        return next((one for one in (*self.residents, *self.absent) if one.adapter_id == adapter_id), None)

    def may_leave(self, adapter_id: AdapterId) -> bool:
        resident = next(one for one in self.residents if one.adapter_id == adapter_id)
        return not resident.is_pinned and adapter_id not in self.staying

    def is_at_hand(self, adapter_id: AdapterId) -> bool:
        return adapter_id not in self.being_read

    def is_being_read(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self.being_read

    def can_start(self, adapter_id: AdapterId) -> bool:
        found = self.view_of(adapter_id)
        return found is not None and found.waiting > 0 and adapter_id not in self.unable

    def blocks_to_start(self, adapter_id: AdapterId) -> int:
        return self.prompt_blocks if self.can_start(adapter_id) else 0

    def claimants(self) -> Iterator[View]:
        return iter(self.absent)
