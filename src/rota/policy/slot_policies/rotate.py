"""`rotate` gives every adapter its turn: some are settled in their slots, and the others come for visits.

A newcomer, an adapter that waits for a first token, comes for as long as its prompts take, and is then parked: its
sequences keep their KV. A parked adapter that has had no token for a while comes for a turn of a few steps. A settled
adapter steps aside for them, and comes back.

While few adapters are parked, this is rotation: first tokens come at once, and no sequence pauses for long. In a crowd
first tokens still come at once, and a turn comes after one round over all that are parked. It is longer there, because
every turn costs two copies.

All times are counted in steps, as long as steps are at present.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Self

from rota.core.capacity import Capacity
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.policy.slot_policy import Outlook, SlotPolicy, Turn
from rota.policy.views import AdapterView, SlotsView, lacks_only_a_slot
from rota.policy.visits import Leavers, Settled, Visits, by_claim

# Longer than any wait.
BEHIND_NEWCOMERS_S = 1e6

# A settled adapter that came less than this many steps ago does not step aside. One that has been out for as long comes
# back before others come.
STEADY_STEPS = 8
# A resident with prompts to compute stays, but not for prompts that came after an adapter that waits for so many steps.
LATE_STEPS = 128


class Rotate(SlotPolicy):
    """Who is settled and who visits is looked at once a pass; the questions answer from that."""

    def __init__(self, turn_s: float | None = None, max_stall_s: float | None = None) -> None:
        self._settled = Settled()
        self._visits = Visits(turn_s, max_stall_s)
        self._prompts_only: frozenset[AdapterId] = frozenset()

    @classmethod
    def from_config(cls, config: PolicyConfig, capacity: Capacity) -> Self:
        return cls(_seconds(config.lora_rotation_quantum_ms), _seconds(config.lora_max_stall_ms))

    # ── what is seen once a pass ─────────────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, now: float) -> None:
        self._settled.observe(slots, now)
        self._visits.observe(slots, self._settled, now)
        self._prompts_only = frozenset(map(_id, self._only_for_prompts(slots)))

    def _only_for_prompts(self, slots: SlotsView) -> Iterator[AdapterView]:
        """While weights share the slots, a visit for a first token is none for the tokens after it.

        But only beside a settled adapter that runs: where none can run, withheld tokens would help no adapter. Without
        rows it cannot run, and the visitors may hold them.
        """
        if not (self._settled.shares and slots.absent):
            return
        if any(view.rows for view in slots.residents if view.adapter_id in self._settled):
            visitors = (view for view in slots.residents if view.adapter_id not in self._settled)
            yield from (view for view in visitors if not self._visits.is_on_turn(view.adapter_id))

    def due_at(self, view: AdapterView) -> float:
        """Newcomers by arrival; behind them parked adapters, the oldest request first."""
        due_at = view.first_token_due_at
        return due_at if due_at < math.inf else view.first_arrival + BEHIND_NEWCOMERS_S

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def keeps_running_at_hand(self) -> bool:
        """A promise of a longest pause would not survive a slow disk."""
        return self._visits.has_promise

    @property
    def wanted(self) -> list[AdapterId]:
        return [*self._settled, *self._settled.next]

    @property
    def prompts_only(self) -> frozenset[AdapterId]:
        return self._prompts_only

    def outlook(self, view: AdapterView, slots: SlotsView) -> Outlook:
        """Adapters that come for a visit now are next; of the others, the oldest request comes nearly first."""
        adapter_id, order = view.adapter_id, slots.absent.oldest
        if adapter_id in self._settled:
            return Outlook(is_settled=True)
        if view in self._visits.newcomers or view in self._visits.stalled:
            return Outlook()
        before = order.rank(adapter_id)
        return Outlook(before - sum(one in order and order.rank(one) < before for one in self._settled))

    def promisable_s(self, slots: SlotsView) -> float:
        return self._visits.promisable_s(slots, self._settled)

    def line(self, slots: SlotsView, now: float) -> Iterator[AdapterView]:
        """Settled adapters that were out for long, newcomers, stalled adapters, the others by their claims."""
        late, soon = self._coming_back(slots, now)
        coming = (*map(_id, late), *map(_id, self._visits.newcomers), *map(_id, self._visits.stalled))
        for adapter_id in dict.fromkeys((*coming, *map(_id, soon), *self._settled.next)):
            view = slots.absent.get(adapter_id)
            if view and slots.is_at_hand(adapter_id):
                yield view

    def turns(self, slots: SlotsView, now: float) -> list[Turn]:
        """Settled adapters come back when a visit is over; for visits they step aside."""
        copies = slots.copies
        if copies <= 0:
            return []
        late, soon = self._coming_back(slots, now)
        newcomers = [one for one in self._visits.newcomers if _can_come(slots, one)]
        stalled = [one for one in self._visits.stalled if _can_come(slots, one)]
        if not (late or soon or newcomers or stalled):
            return []
        late_since = self._late_since(slots, [*late, *soon, *newcomers], now)
        leavers = Leavers(slots, self._settled, self._visits, now - self._steady_s(slots), now, late_since)
        turns: list[Turn] = []
        for comers, leaver_for in (
            (late, leavers.for_settled),
            (newcomers, leavers.for_newcomer),
            (stalled, leavers.for_stalled),
            (soon, leavers.for_settled),
        ):
            for comer in comers[: copies - len(turns)]:
                if leaver := leaver_for():
                    turns.append(Turn(leaver.adapter_id, comer.adapter_id))
        return turns

    def forget(self, adapter_id: AdapterId) -> None:
        self._settled.forget(adapter_id)
        self._visits.forget(adapter_id)

    def _steady_s(self, slots: SlotsView) -> float:
        return STEADY_STEPS * slots.step_s

    def _late_since(self, slots: SlotsView, comers: list[AdapterView], now: float) -> float:
        """When the adapter came that waits for longest, if that is too long; infinity if none does."""
        since = min((super(Rotate, self).due_at(view) for view in comers), default=math.inf)
        return since if now - since > LATE_STEPS * slots.step_s else math.inf

    def _coming_back(self, slots: SlotsView, now: float) -> tuple[list[AdapterView], list[AdapterView]]:
        """Settled adapters without a slot, the largest claim first: those that were out for long, and the others."""
        absent = (view for one in self._settled if (view := slots.absent.get(one)))
        able = [view for view in absent if slots.is_at_hand(view.adapter_id) and lacks_only_a_slot(slots, view)]
        by_claim(able, now)
        long_ago = now - self._steady_s(slots)
        return [view for view in able if view.ran_at <= long_ago], [view for view in able if view.ran_at > long_ago]


def _can_come(slots: SlotsView, view: AdapterView) -> bool:
    """Has it no slot yet, and are its weights in host memory still? Both may have changed since it was looked at."""
    return view.adapter_id in slots.absent and slots.is_at_hand(view.adapter_id)


def _id(view: AdapterView) -> AdapterId:
    return view.adapter_id


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
