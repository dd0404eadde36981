"""A slot policy decides which adapters hold the device's slots while more adapters have work than there are slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from rota.core.events import DrainChanged
from rota.core.ids import AdapterId
from rota.policy.views import AdapterView, SlotsView

# ── outlook ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# An outlook says how near an adapter that has work and no slot is to a slot.


@dataclass(frozen=True, slots=True)
class Outlook:
    """Settled adapters come back by themselves; others have `ahead` absent adapters before them."""

    ahead: int = 0
    is_settled: bool = False

    def sentence(self, is_counted: bool = True) -> str:
        """`is_counted`: may the reader know how many other adapters wait?"""
        if self.is_settled:
            return "its adapter is settled and comes back when a visit is over"
        if not self.ahead:
            return "its adapter is next in line"
        others = f"{self.ahead} other{'s' if self.ahead > 1 else ''}" if is_counted else "others"
        return f"its adapter waits behind {others}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One adapter leaves its slot for another."""

    leaver: AdapterId
    successor: AdapterId


class SlotPolicy(Protocol):
    """The scheduler itself gives away slots that are empty or idle, first due first. A policy decides the rest.

    `observe` comes first in every pass. The other methods are questions and change nothing, except `forget` and
    `take_news`. A policy inherits from this class and overrides what it decides. By default the longest wait is due
    first, busy residents keep their slots, and every request is admitted.
    """

    def observe(self, slots: SlotsView, now: float) -> None:
        """Once a pass: look at the slots, and remember what the questions need."""
        return None

    def due_at(self, view: AdapterView) -> float:
        """When an adapter without a slot will have waited long enough: for a first token, or for the next."""
        return min(view.first_token_due_at, view.ran_at if view.running else math.inf)

    @property
    def due_edition(self) -> int:
        """Changes whenever `due_at` begins to answer differently; absent adapters are then sorted anew."""
        return 0

    @property
    def reserved(self) -> Set[AdapterId]:
        """Adapters for which a free slot is kept."""
        return frozenset()

    @property
    def keeps_running_at_hand(self) -> bool:
        """Does no adapter leave host memory while its answers are under way? Then no read from disk pauses them."""
        return False

    @property
    def wanted(self) -> Iterable[AdapterId]:
        """Absent adapters that get a slot as soon as their weights are in host memory; they are read first."""
        return ()

    @property
    def prompts_only(self) -> Set[AdapterId]:
        """Residents that only compute prompts in this step: their other sequences have no turn."""
        return frozenset()

    def line(self, slots: SlotsView, now: float) -> Iterator[AdapterView]:
        """Absent adapters that lack nothing but a slot, in the order in which free slots go to them."""
        return slots.claimants()

    def turns(self, slots: SlotsView, now: float) -> Sequence[Turn]:
        """Which busy residents leave now, and for which claimants; as many as there are landings begin."""
        return ()

    def admits(self, view: AdapterView, steps_needed: int) -> bool:
        """May a resident take on a request that needs `steps_needed` steps?"""
        return True

    def outlook(self, view: AdapterView, slots: SlotsView) -> Outlook:
        """How near an absent adapter is to a slot, for clients and operators that ask."""
        return Outlook(slots.absent.rank(view.adapter_id))

    def promisable_s(self, slots: SlotsView) -> float:
        """The shortest pause of an answer that could be promised now; 0: the policy pauses none for a turn."""
        return 0.0

    def ask_again_at(self, slots: SlotsView, now: float) -> float:
        """When the answers may change without a message or a step; infinity if they cannot."""
        return math.inf

    def take_news(self) -> list[DrainChanged]:
        """Drains that changed, for observers; each event is given once. The scheduler adds which engine it is of."""
        return []

    def forget(self, adapter_id: AdapterId) -> None:
        """An adapter was unloaded: nothing about it is kept."""
        return None
