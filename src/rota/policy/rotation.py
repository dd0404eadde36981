"""Rotation gives every adapter with work its turn in a slot; sequences that must step aside keep their KV.

A tenant may be asked to leave once its quantum is over. Who comes in its place is ranked: first whoever has
been kept waiting beyond reason (for a first token, or stalled over the limit), longest first; then by claim,
the sum of the roots of its sequences' ages, which keeps the batch full and the old moving.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from rota.core.ids import AdapterId
from rota.policy.views import AdapterView

Rank = tuple[int, float, AdapterId]


@dataclass(frozen=True, slots=True)
class Turn:
    """One adapter leaves its slot for another."""

    leaver: AdapterId
    comer: AdapterId


@dataclass(frozen=True, slots=True)
class LoRARotation:
    """Stateless: all it needs to know is in the views."""

    quantum_s: float
    max_stall_s: float

    def turn_over_at(self, tenant: AdapterView) -> float:
        """When a tenant may be asked to leave."""
        return tenant.slot_since + self.quantum_s * tenant.weight

    def turns(self, tenants: Iterable[AdapterView], claimants: Iterable[AdapterView], now: float) -> list[Turn]:
        """Who leaves for whom, now. `tenants` may leave if their turn is over; `claimants` have work and no slot."""
        may_leave = (tenant for tenant in tenants if now >= self.turn_over_at(tenant) and not tenant.is_pinned)
        leaving = sorted((self._rank(tenant, now) for tenant in may_leave), reverse=True)
        coming = sorted(self._rank(claimant, now) for claimant in claimants) if leaving else []
        pairs = takewhile(lambda pair: pair[1] < pair[0], zip(leaving, coming, strict=False))
        return [Turn(leaver, comer) for (*_, leaver), (*_, comer) in pairs]

    def _rank(self, view: AdapterView, now: float) -> Rank:
        """Lower goes first."""
        urgent_at = min(view.first_token_due_at, view.ran_at + self.max_stall_s if view.running else float("inf"))
        if urgent_at <= now:
            return (0, urgent_at, view.adapter_id)
        return (1, -view.claim(now) * view.weight, view.adapter_id)
