"""Leavers are the residents that may leave for a visit, or for a settled adapter that comes back."""

from __future__ import annotations

import math

from rota.policy.settled import Settled
from rota.policy.views import AdapterView, SlotsView
from rota.policy.visits import MOST_VISITS, Visits


class Leavers:
    """One pass over the residents; each of them leaves once at most."""

    def __init__(
        self,
        slots: SlotsView,
        settled: Settled,
        visits: Visits,
        steady_since: float,
        now: float,
        late_since: float = math.inf,
    ) -> None:
        """Prompts that came after `late_since`, when an adapter that waits too long came, keep no resident there."""
        self._free: list[AdapterView] = []  # their visit is over
        self._on_turn: list[AdapterView] = []  # a newcomer may cut their turn short
        self._steady: list[AdapterView] = []  # settled adapters that may step aside
        self._visitors = 0
        self._most_visitors = MOST_VISITS + slots.surplus  # of those that are there, some are in slots that have closed
        for view in slots.residents:
            may_leave = slots.may_leave(view.adapter_id) and not _has_prompts(slots, view, late_since)
            if view.adapter_id in settled:
                if may_leave and view.slot_since <= steady_since:
                    self._steady.append(view)
            elif may_leave and (not view.running or visits.is_over(view, now)):
                self._free.append(view)
            elif may_leave and visits.is_on_turn(view.adapter_id):
                self._on_turn.append(view)
            else:
                self._visitors += 1
        for views in (self._free, self._steady):
            views.sort(key=lambda view: (-view.claim(now) * view.weight, view.adapter_id))

    def for_settled(self) -> AdapterView | None:
        """A settled adapter comes back when a visit is over."""
        return self._free.pop() if self._free else None

    def for_newcomer(self) -> AdapterView | None:
        """For a first token a settled adapter steps aside, the smallest claim first."""
        if self._visitors >= self._most_visitors:
            return None
        for views in (self._free, self._on_turn, self._steady):
            if views:
                self._visitors += 1
                return views.pop()
        return None

    def for_stalled(self) -> AdapterView | None:
        """As for a newcomer, but no other turn is cut short."""
        if self._visitors + len(self._on_turn) >= self._most_visitors:
            return None
        for views in (self._free, self._steady):
            if views:
                self._visitors += 1
                return views.pop()
        return None


def _has_prompts(slots: SlotsView, view: AdapterView, late_since: float) -> bool:
    """Does it compute a prompt, or is it about to start one?"""
    return view.is_prefilling or (view.oldest_at < late_since and slots.can_start(view.adapter_id))
