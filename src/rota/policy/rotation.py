"""Rotation gives every adapter with work its turn in a slot; sequences that must step aside keep their KV.

A tenant may be asked to leave once its quantum is over. Who comes in its place is ranked: first whoever has
been kept waiting beyond reason (for a first token, or stalled over the limit), longest first; then by claim,
the sum of the roots of its sequences' ages, which keeps the batch full and the old moving. A claim wears off in the
slot and grows outside of it, so equal claims take equal turns.

The more adapters wait for a slot, the longer a round of turns takes. A stall limit shorter than that makes everybody
due at once, and first tokens wait behind all of them; so the limit stretches with the round, within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from rota.core.ids import AdapterId
from rota.policy.views import AdapterView

Rank = tuple[int, float, AdapterId]

# So many quanta in a slot halve a claim, and so many outside double it. Faster wear shares slot time more equally (in
# the worst 10 s of `tail-ttft` a factor of 1.96 instead of 2.11 at 16) and keeps larger groups out for longer.
WEARING_QUANTA = 5
# One copy after another, and two steps for each: until it is seen to be complete, and until the one that left is done.
STEPS_PER_TURN = 2
MOST_STRETCH = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One adapter leaves its slot for another."""

    leaver: AdapterId
    comer: AdapterId


@dataclass(slots=True)
class LoRARotation:
    """Remembers how far the stall limit is stretched, and nothing else: all it needs to know is in the views."""

    quantum_s: float
    max_stall_s: float
    _stretch: int = 1

    @property
    def stall_limit_s(self) -> float:
        """How long sequences go without a token before their adapter is due, as things are."""
        return self.max_stall_s * self._stretch

    def observe(self, claimants: int, step_s: float) -> None:
        """Once a pass: so many adapters have work and no slot, and a step takes so long."""
        round_s = STEPS_PER_TURN * step_s * claimants
        # In powers of two: whoever keeps claimants in order of `due_at` has to sort them anew at every change.
        self._stretch = 1
        while self._stretch < MOST_STRETCH and 2 * self._stretch * self.max_stall_s <= round_s:
            self._stretch *= 2

    def turn_over_at(self, tenant: AdapterView) -> float:
        """When a tenant may be asked to leave."""
        return tenant.slot_since + self.quantum_s * tenant.weight

    def due_at(self, view: AdapterView) -> float:
        """When it will have been kept waiting beyond reason: for a first token at once, for the next after a while."""
        # Whoever ran since it was asked and did not start lacks KV or a row, which no turn gives: it counts from then.
        first_due_at = max(view.first_token_due_at, view.ran_at)
        return min(first_due_at, view.ran_at + self.stall_limit_s if view.running else math.inf)

    def turns(self, tenants: Iterable[AdapterView], claimants: Iterable[AdapterView], now: float) -> list[Turn]:
        """Who leaves for whom, now. `tenants` may leave if their turn is over; `claimants` have work and no slot."""
        may_leave = (tenant for tenant in tenants if now >= self.turn_over_at(tenant) and not tenant.is_pinned)
        leaving = [self._rank(tenant, now, 1.0 / self._wear(tenant.slot_since, now)) for tenant in may_leave]
        if not leaving:
            return []
        coming = [self._rank(claimant, now, self._wear(claimant.ran_at, now)) for claimant in claimants]
        pairs = zip(sorted(leaving, reverse=True), sorted(coming), strict=False)
        return [Turn(leaver, comer) for (*_, leaver), (*_, comer) in takewhile(lambda pair: pair[1] < pair[0], pairs)]

    def _wear(self, since: float, now: float) -> float:
        return 1.0 + (now - since) / (WEARING_QUANTA * self.quantum_s)

    def _rank(self, view: AdapterView, now: float, wear: float) -> Rank:
        """Lower goes first."""
        due_at = self.due_at(view)
        if due_at <= now:
            return (0, due_at, view.adapter_id)
        return (1, -view.claim(now) * view.weight * wear, view.adapter_id)
