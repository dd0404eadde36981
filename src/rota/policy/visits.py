"""Visits bring adapters that are not settled into slots: for a first token, or for a turn after a long pause.

A newcomer comes at once. A turn for every parked adapter would pause each answer often, so with more parked adapters
than slots turns become rarer, and end.

The operator may promise a longest pause instead. Then turns do not become rarer, and newcomers wait for their first
token while more adapters are parked than can have a turn in time.
"""

from __future__ import annotations

import math
from itertools import islice

from rota.core.ids import AdapterId
from rota.policy.settled import Settled, is_kv_short
from rota.policy.shares import Shares
from rota.policy.views import AdapterView, SlotsView

# Visits at a time. Each takes a slot from a settled adapter for the step of its copy and for the visit.
MOST_VISITS = 2
# A parked adapter has a turn of this many steps after this many steps without a token.
TURN_STEPS = 3
STALL_STEPS = 16
# With a promise, turns are longer: fewer copies then. A turn begins when this part of the promised time is over, and
# this part of all turns that fit into that time is promised. The rest is for first tokens, and for turns that wait.
PROMISED_TURN_STEPS = 6
PROMISED_PART = 0.8
PROMISED_TURNS = 0.7
# That wait doubles for every such part of the slots by which parked adapters outnumber them.
FADING = 4
MOST_DOUBLINGS = 40
# Parked sequences may always hold this part of all KV blocks. They may hold more while settled adapters have room.
PART_FOR_PARKED = 0.1
# While weights share the slots, pauses are this many times longer at most, however heavy the others are.
MOST_RARE = 8.0
# This many adapters that lack KV or are still being read are passed over in a pass, and this many newcomers are found.
LOOK_AHEAD = 16
MOST_NEWCOMERS = 2 * MOST_VISITS
# Of the parked adapters, this many are looked at, the longest without a token first.
MOST_LOOKS = 64


class Visits:
    """Looked at once a pass. What it remembers is which adapters have a turn, not a visit for a first token."""

    def __init__(self, turn_s: float | None = None, max_stall_s: float | None = None) -> None:
        """Turns take `turn_s` instead of a few steps; `max_stall_s` is the longest pause that is promised."""
        self._turn_s = turn_s
        self._max_stall_s = max_stall_s
        self._turn_steps = TURN_STEPS if max_stall_s is None else PROMISED_TURN_STEPS
        self._on_turn: set[AdapterId] = set()
        self.newcomers: list[AdapterView] = []
        self.stalled: list[AdapterView] = []
        self.parked = 0

    # ── what was seen in this pass ───────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, settled: Settled, now: float) -> None:
        self.newcomers, self.stalled = [], []
        self._on_turn = {one for one in self._on_turn if one not in slots.absent}
        self.parked = len(slots.parked) - sum(one in slots.parked for one in settled)
        if not slots.absent:
            return
        held = settled.views(slots)
        if self._has_time_for_more(slots):
            self.newcomers = self._able(slots, settled, held)
        if not is_kv_short(slots, held):
            self.stalled = self._without_a_token(slots, settled, now)
        self._on_turn |= {view.adapter_id for view in self.stalled}

    def forget(self, adapter_id: AdapterId) -> None:
        self._on_turn.discard(adapter_id)

    @property
    def has_promise(self) -> bool:
        return self._max_stall_s is not None

    @property
    def both(self) -> tuple[list[AdapterView], list[AdapterView]]:
        return self.newcomers, self.stalled

    def is_on_turn(self, adapter_id: AdapterId) -> bool:
        """Has it come for a turn? Otherwise it has come for a first token."""
        return adapter_id in self._on_turn

    def is_over(self, view: AdapterView, now: float) -> bool:
        """Has an adapter with no prompt to compute stayed as long as it may?"""
        if not self.is_on_turn(view.adapter_id):
            return view.turn_steps > 0
        if self._turn_s is not None:
            return now - view.slot_since >= self._turn_s
        return view.turn_steps >= self._turn_steps

    # ── first tokens ─────────────────────────────────────────────────────────────────────────────────────────────

    def _has_time_for_more(self, slots: SlotsView) -> bool:
        """Could one more parked adapter have its turns as often as promised?"""
        if self._max_stall_s is None:
            return True
        turn_s = self._turn_s or self._turn_steps * slots.step_s
        turns = MOST_VISITS * self._max_stall_s / (turn_s + slots.step_s)
        return self.parked < PROMISED_TURNS * turns

    def _able(self, slots: SlotsView, settled: Settled, held: list[AdapterView]) -> list[AdapterView]:
        """The first newcomers that lack nothing but a slot, and whose KV leaves settled adapters room to finish."""
        settled_blocks = sum(view.blocks for view in held)
        spare = max(PART_FOR_PARKED * slots.blocks, slots.blocks - 2 * settled_blocks)
        spare -= slots.adapter_blocks - settled_blocks
        able: list[AdapterView] = []
        passed_over = 0
        for view in slots.newcomers:
            if passed_over == LOOK_AHEAD or len(able) == MOST_NEWCOMERS:
                break
            if view.adapter_id in settled:
                continue
            needed = 0 if view.is_prefilling else slots.blocks_to_start(view.adapter_id)
            if slots.is_at_hand(view.adapter_id) and needed <= spare and self._can_work(slots, view):
                able.append(view)
                spare -= needed
            else:
                passed_over += 1
        return able

    def _can_work(self, slots: SlotsView, view: AdapterView) -> bool:
        return view.is_prefilling or slots.can_start(view.adapter_id)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _without_a_token(self, slots: SlotsView, settled: Settled, now: float) -> list[AdapterView]:
        """Parked adapters whose pause is long enough for a turn, the longest first."""
        stall_s = self._stall_s(slots)
        shares = settled.shares if self._max_stall_s is None else Shares()  # weights break no promise
        bound_s = MOST_RARE * STALL_STEPS * slots.step_s if shares else stall_s
        stalled: list[AdapterView] = []
        for view in islice(slots.parked, MOST_LOOKS):
            pause_s = now - view.ran_at
            if pause_s <= min(bound_s, stall_s) or len(stalled) == MOST_VISITS:
                break
            if view.adapter_id in settled or view in self.newcomers or not slots.is_at_hand(view.adapter_id):
                continue
            if pause_s > min(bound_s, stall_s * shares.rarity(view)):
                stalled.append(view)
        return stalled

    def _stall_s(self, slots: SlotsView) -> float:
        if self._max_stall_s is not None:
            return PROMISED_PART * self._max_stall_s
        doublings = FADING * max(0, self.parked - slots.total) / slots.total
        return STALL_STEPS * slots.step_s * math.pow(2.0, min(MOST_DOUBLINGS, doublings))
