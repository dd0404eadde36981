"""Gathering lets prompts start together while many adapters are parked: each step with a prompt delays all the others.

Prompts of residents wait for the next visit of a newcomer, or for a bounded time, and then start in one step. A slot in
which nothing runs never waits.
"""

from __future__ import annotations

from rota.policy.views import SlotsView

# For each parked adapter that has no slot to wait for, prompts are held back this many steps, and these at most.
STEPS_FOR_EACH = 2
MOST_STEPS = 8
NEVER = -2


class Gathering:
    """Remembers the pass in which prompts last began to start."""

    def __init__(self) -> None:
        self._pass = 0
        self._opened_in = NEVER
        self.is_holding = False

    @property
    def is_open(self) -> bool:
        """Did prompts begin to start in the last pass? Newcomers whose visit was ordered then start in this one."""
        return self._opened_in >= self._pass - 1

    def next_pass(self) -> None:
        self._pass += 1
        self.is_holding = False

    def hold(self, slots: SlotsView, parked: int, has_visit: bool, now: float) -> None:
        """Decide whether prompts of residents are held back in this pass; `has_visit` says that a newcomer comes."""
        steps = min(MOST_STEPS, STEPS_FOR_EACH * max(0, parked - slots.total))
        if not steps or self.is_open:
            return
        first_at = min((view.oldest_at for view in slots.residents if view.waiting), default=now)
        if has_visit:
            # The visitor's copy takes a step. Prompts start with the visitor's, in the next pass.
            self._opened_in, self.is_holding = self._pass, True
        elif now - first_at >= steps * slots.step_s:
            self._opened_in = self._pass - 1
        else:
            self.is_holding = True
