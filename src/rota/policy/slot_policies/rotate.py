"""`rotate` gives every adapter with work its turn in a slot; sequences of an adapter that leaves keep their KV.

A resident may be asked to leave once its quantum is over. The adapters that may take its place are ranked. Adapters
that are due come first (a first token is due, or the stall limit has passed), the longest wait first. Then comes the
largest claim: the sum of the square roots of the ages of an adapter's sequences. It keeps the batch full and old
sequences moving. A claim falls in a slot and grows outside, so equal claims take equal turns.

The more adapters wait for a slot, the longer a round of turns takes. If the stall limit were shorter than a round, all
adapters would be due at once, and first tokens would wait behind all of them. So the limit grows with the round, within
bounds.
"""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Self

from rota.core.config import Capacity
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policy import SlotPolicy, Turn
from rota.policy.views import AdapterView, SlotsView

Rank = tuple[int, float, AdapterId]

# A claim halves in this many quanta in a slot, and doubles in as many outside. A faster change shares slot time more
# equally (in the worst 10 s of `tail-ttft` a factor of 1.96 instead of 2.11 at 16), but larger groups stay out longer.
WEARING_QUANTA = 5
# Copies come one after another, and each takes two steps: until the copy is known to be complete, and until the last
# step of the adapter that left is done.
STEPS_PER_TURN = 2
MOST_STRETCH = 8


class Rotate(SlotPolicy):
    """Remembers only how far the stall limit is stretched: the views have everything else."""

    def __init__(self, quantum_s: float, max_stall_s: float) -> None:
        self._quantum_s = quantum_s
        self._max_stall_s = max_stall_s
        self._stretch = 1

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls(config.lora_rotation_quantum_ms / 1000, config.lora_max_stall_ms / 1000)

    # ── when an adapter is due ───────────────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, now: float) -> None:
        """Stretch the stall limit: a round of turns is longer if more adapters are absent, or if steps take longer."""
        if not slots.absent:
            return
        round_s = STEPS_PER_TURN * slots.step_s * len(slots.absent)
        # In powers of two: the absent adapters have to be sorted anew at every change.
        self._stretch = 1
        while self._stretch < MOST_STRETCH and 2 * self._stretch * self._max_stall_s <= round_s:
            self._stretch *= 2

    @property
    def stall_limit_s(self) -> float:
        """How long sequences go at present without a token before their adapter is due."""
        return self._max_stall_s * self._stretch

    @property
    def due_edition(self) -> int:
        return self._stretch

    def due_at(self, view: AdapterView) -> float:
        """For a first token an adapter is due at once, for the next token after the stall limit."""
        # A request that did not start when its adapter last ran lacks KV or a row, which a turn does not give. So its
        # wait counts from then.
        first_due_at = max(view.first_token_due_at, view.ran_at)
        return min(first_due_at, view.ran_at + self.stall_limit_s if view.running else math.inf)

    # ── who leaves for which claimant ────────────────────────────────────────────────────────────────────────────────

    def turns(self, slots: SlotsView, now: float) -> list[Turn]:
        """Residents whose turn is over leave, lowest rank first, for the claimants of the highest rank."""
        over = (
            [resident for resident in slots.residents if now >= self.turn_over_at(resident)]
            if slots.landings > 0
            else []
        )
        leaving = [
            self._rank(resident, now, 1.0 / self._wear(resident.slot_since, now))
            for resident in over
            if slots.may_leave(resident.adapter_id)
        ]
        if not leaving:
            return []
        claimants = self._first_claimants(slots, min(slots.landings, len(leaving)), now)
        coming = [self._rank(claimant, now, self._wear(claimant.ran_at, now)) for claimant in claimants]
        pairs = zip(sorted(leaving, reverse=True), sorted(coming), strict=False)
        return [Turn(leaver, successor) for (*_, leaver), (*_, successor) in takewhile(_deserves_it, pairs)]

    def turn_over_at(self, resident: AdapterView) -> float:
        """When a resident may be asked to leave."""
        return resident.slot_since + self._quantum_s * resident.weight

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        """When the next turn is over."""
        if slots.landings <= 0:
            return math.inf
        over_at = map(self.turn_over_at, slots.residents)
        return min((at for at in over_at if at > now), default=math.inf)

    def _first_claimants(self, slots: SlotsView, most: int, now: float) -> list[AdapterView]:
        """The first `most` claimants if all of them are due, or else all claimants."""
        found: list[AdapterView] = []
        for claimant in slots.claimants():
            found.append(claimant)
            if len(found) == most and self.due_at(claimant) <= now:
                break
        return found

    def _wear(self, since: float, now: float) -> float:
        return 1.0 + (now - since) / (WEARING_QUANTA * self._quantum_s)

    def _rank(self, view: AdapterView, now: float, wear: float) -> Rank:
        """Lower goes first."""
        due_at = self.due_at(view)
        if due_at <= now:
            return (0, due_at, view.adapter_id)
        return (1, -view.claim(now) * view.weight * wear, view.adapter_id)


def _deserves_it(pair: tuple[Rank, Rank]) -> bool:
    leaving, coming = pair
    return coming < leaving
