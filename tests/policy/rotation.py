"""Adapters as `rotate` meets them: residents, newcomers, parked ones. The present is 100 s, and steps take 10 ms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rota.core.ids import AdapterId
from rota.policy.slot_policies.rotate import Rotate
from rota.policy.slot_policy import Turn
from tests.policy.views import Absent, Slots, View, view

NOW, STEP_S = 100.0, 0.01


def ago(steps: float) -> float:
    """The moment so many steps ago."""
    return NOW - steps * STEP_S


def resident(adapter_id: AdapterId, claims: float = 10.0, since: float = 50.0, **fields: Any) -> View:
    """In its slot for long, with one answer under way."""
    given = {"running": 1, "ran_at": NOW, "turn_steps": 99, **fields}
    return view(adapter_id, claims=claims, slot_since=since, **given)


def newcomer(adapter_id: AdapterId, since: float = ago(1), claims: float = 1.0, **fields: Any) -> View:
    return view(adapter_id, waiting_since=since, claims=claims, **fields)


def parked(adapter_id: AdapterId, ran_at: float = ago(1), claims: float = 1.0, **fields: Any) -> View:
    return view(adapter_id, running=1, ran_at=ran_at, claims=claims, **fields)


def slots(residents: Iterable[View], absent: Iterable[View] = (), **fields: Any) -> Slots:
    return Slots([*residents], Absent(absent), step_s=STEP_S, **fields)


def rotate_with(residents: Iterable[View], **fields: Any) -> Rotate:
    """All of `residents`, as many as there are slots, are settled."""
    settled = [*residents]
    policy = Rotate(**fields)
    policy.observe(slots(settled), NOW - 1.0)
    assert policy.wanted == [one.adapter_id for one in sorted(settled, key=lambda one: (-one.claims, one.adapter_id))]
    return policy


def turns(policy: Rotate, seen: Slots, now: float = NOW) -> list[Turn]:
    """One pass."""
    policy.observe(seen, now)
    return policy.turns(seen, now)
