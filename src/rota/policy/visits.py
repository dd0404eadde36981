"""Some adapters are settled in their slots, and the others come for visits: by which shares, and who leaves when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from rota.core.ids import AdapterId
from rota.policy.views import AdapterView, SlotsView

# ── shares ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Shares count what adapters of different weights have got, so that tokens come in the proportion of the weights.

# An adapter makes room once it is this many of its steps ahead of an adapter that is behind.
STEPS_AHEAD = 16


class Shares:
    """By adapter: tokens so far, and tokens for each unit of weight. Empty while all weights are equal."""

    def __init__(self) -> None:
        self._served: dict[AdapterId, tuple[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._served)

    def count(self, views: Sequence[AdapterView]) -> bool:
        """Look at all adapters with work; False if their weights are equal, and nothing is counted.

        An adapter whose work came a moment ago begins where the adapter that has got least stands: time without work
        earns nothing.
        """
        weights = {view.weight for view in views}
        known, self._served = self._served, {}
        if len(weights) < 2:
            return False
        least = min((served for _, served in known.values()), default=0.0)
        for view in views:
            tokens, served = known.get(view.adapter_id, (view.attained, least))
            self._served[view.adapter_id] = (view.attained, served + (view.attained - tokens) / view.weight)
        return True

    @property
    def merits(self) -> dict[AdapterId, float]:
        """The adapter that has got least for its weight has the largest merit."""
        return {adapter_id: -served for adapter_id, (_, served) in self._served.items()}

    def margin(self, view: AdapterView) -> float:
        return STEPS_AHEAD * view.running / view.weight


# ── settled ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Settled adapters run until they have no work, or until another adapter's claim is clearly larger.
#
# As many adapters are settled as there are slots. A claim is a sum over an adapter's open requests, waiting or running.
# It grows with their age, and is divided by the tokens that the adapter still needs. That is nearly first come first
# served, but three old requests count for more than one, and a short one for more than a long one. A weight scales the
# claim; while few adapters are absent, weights share the slots exactly (`Shares`).

# Two adapters of nearly equal claims must not take each other's place in turn.
LARGER = 1.5
# While KV is short, the sequences of an adapter that leaves would hold blocks that others need to finish.
LARGER_WHILE_KV_IS_SHORT = 3.0
# Of all absent adapters, those with the oldest requests and those with most requests are looked at.
LOOK_AHEAD = 16
# Claims are compared again after so many passes: they grow with age, and a step is short beside that.
LOOK_EVERY = 4

Merits = dict[AdapterId, float]


class Settled:
    """Remembers which adapters are settled, and which come next."""

    def __init__(self) -> None:
        self._most = 0  # as many as there are slots
        self._ids: dict[AdapterId, None] = {}
        self._passes = 0
        self.shares = Shares()
        self.next: list[AdapterId] = []  # of adapters that are not settled, the largest claims first

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._ids

    def __iter__(self) -> Iterator[AdapterId]:
        return iter(self._ids)

    def views(self, slots: SlotsView) -> list[AdapterView]:
        view_of = slots.view_of
        return [view for one in self._ids if (view := view_of(one))]

    def forget(self, adapter_id: AdapterId) -> None:
        self._ids.pop(adapter_id, None)

    def observe(self, slots: SlotsView, now: float) -> None:
        working = [view.adapter_id for view in self.views(slots) if view.running or view.waiting]
        if len(working) < len(self._ids):
            self._ids = dict.fromkeys(working)
        self._passes += 1
        self._most = slots.total
        if len(self._ids) != self._most or self._passes % LOOK_EVERY == 0:
            self._look(slots, now)

    def _look(self, slots: SlotsView, now: float) -> None:
        held, others = self.views(slots), self._others(slots)
        both = [*held, *others]
        if self.shares.count(both if len(slots.absent) <= LOOK_AHEAD else []):
            merits = self.shares.merits
            self._settle(held, others, merits, bar=lambda least: merits[least.adapter_id] + self.shares.margin(least))
        else:
            merits = {view.adapter_id: view.claim(now) * view.weight for view in both}
            larger = LARGER_WHILE_KV_IS_SHORT if is_kv_short(slots, held) else LARGER
            self._settle(held, others, merits, bar=lambda least: larger * merits[least.adapter_id])

    def _others(self, slots: SlotsView) -> list[AdapterView]:
        """Residents that are not settled, and the absent adapters whose claims may be the largest."""
        found = {view.adapter_id: view for view in slots.residents if view.running or view.waiting}
        if slots.absent:
            for view in (*islice(slots.absent.oldest, LOOK_AHEAD), *islice(slots.absent.largest, LOOK_AHEAD)):
                if view.adapter_id not in found and (view.running or slots.can_start(view.adapter_id)):
                    found[view.adapter_id] = view
        return [view for view in found.values() if view.adapter_id not in self._ids]

    def _settle(
        self,
        held: list[AdapterView],
        others: list[AdapterView],
        merits: Merits,
        bar: Callable[[AdapterView], float],
    ) -> None:
        """Settle the adapters of the largest merit: first where there is room, then over the bars of settled ones."""

        def rank(view: AdapterView) -> tuple[float, AdapterId]:
            return (-merits[view.adapter_id], view.adapter_id)

        held = sorted(held, key=rank)
        while len(held) > self._most:  # slots have closed
            others.append(held.pop())
            del self._ids[others[-1].adapter_id]
        others.sort(key=rank)
        room = self._most - len(self._ids)
        self._ids |= dict.fromkeys(view.adapter_id for view in others[:room])
        for least, other in zip(reversed(held), others[room:], strict=False):
            if merits[other.adapter_id] <= bar(least):
                break
            del self._ids[least.adapter_id]
            self._ids[other.adapter_id] = None
        self.next = [view.adapter_id for view in others if view.adapter_id not in self._ids]


def is_kv_short(slots: SlotsView, settled: list[AdapterView]) -> bool:
    """Are fewer blocks free than settled adapters hold? Then their sequences might not find room to finish."""
    return slots.free_blocks < sum(view.blocks for view in settled)


# ── visits ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Visits bring adapters that are not settled into slots: for a first token, or for a turn after a long pause.
#
# A newcomer comes at once. While few adapters are parked, each has a short turn after a short pause. The turns of a
# crowd come after one round over all that are parked, and are longer, because every turn costs two copies.
#
# The operator may promise a longest pause instead. Then newcomers wait for their first token while one round would take
# longer.

# Visits at a time, and of many slots a quarter. Each takes a slot from a settled adapter for the step of its copy and
# for the visit.
MOST_VISITS = 2
PART_FOR_VISITS = 4
# While no more adapters than this are parked, each has a turn of so many steps after so many steps without a token.
FEW_PARKED = 4
TURN_STEPS = 3
STALL_STEPS = 15
CROWD_TURN_STEPS = 10
PROMISED_TURN_STEPS = 6
# Turns have this part of a round. The rest is for first tokens, and for turns that wait.
PART_FOR_TURNS = 0.75
# In a crowd adapters whose readers have no text have their turn sooner: after this part of a round.
PART_FOR_THE_DRY = 0.9
# A turn begins when this part of the promised time is over.
PROMISED_PART = 0.8
# Beside its copy, a change of adapters takes this many steps, as two are in flight.
CHANGE_STEPS = 2
# Parked sequences may always hold this part of all KV blocks. They may hold more while settled adapters have room.
PART_FOR_PARKED = 0.1
# While weights share the slots, pauses are this many times longer: turns would be a part of no share.
MOST_RARE = 8.0
# This many adapters that lack KV or are still being read are passed over in a pass, and this many newcomers are found.
VISITS_AHEAD = 16
MOST_NEWCOMERS = 2 * MOST_VISITS
# Of the parked adapters, this many are looked at, the longest without a token first.
MOST_LOOKS = 64


def most_visits(slots: SlotsView) -> int:
    return max(MOST_VISITS, slots.total // PART_FOR_VISITS)


def promised_turn_s(turn_s: float | None, step_s: float) -> float:
    """How long a turn takes under a promise, if the operator gave `turn_s` or nothing."""
    return turn_s or PROMISED_TURN_STEPS * step_s


def least_promise_s(step_s: float, copy_s: float = 0.0, turn_s: float | None = None) -> float:
    """The shortest pause that can be promised: when a turn is due, another turn and a change must fit into the rest."""
    return (promised_turn_s(turn_s, step_s) + CHANGE_STEPS * step_s + copy_s) / (1.0 - PROMISED_PART)


class Visits:
    """Looked at once a pass. What it remembers is which adapters have a turn, not a visit for a first token."""

    def __init__(self, turn_s: float | None = None, max_stall_s: float | None = None) -> None:
        """Turns take `turn_s` instead of a few steps; `max_stall_s` is the longest pause that is promised."""
        self._turn_s = turn_s
        self._max_stall_s = max_stall_s
        self._turn_steps = TURN_STEPS
        self._on_turn: set[AdapterId] = set()
        self.newcomers: list[AdapterView] = []
        self.stalled: list[AdapterView] = []
        self.parked = 0
        self._is_crowd = False

    # ── what was seen in this pass ───────────────────────────────────────────────────────────────────────────────

    def observe(self, slots: SlotsView, settled: Settled, now: float) -> None:
        self.newcomers, self.stalled = [], []
        absent = slots.absent
        self._on_turn = {one for one in self._on_turn if one not in absent}
        parked = absent.stalest
        self.parked = len(parked) - sum(one in parked for one in settled)
        self._is_crowd = self.parked > min(FEW_PARKED, slots.total)
        few_steps = CROWD_TURN_STEPS if self._is_crowd else TURN_STEPS
        self._turn_steps = few_steps if self._max_stall_s is None else PROMISED_TURN_STEPS
        if not absent:
            return
        if absent.newcomers and self._has_time_for_more(slots):
            self.newcomers = self._able(slots, settled)
        stalled = self._without_a_token(slots, settled, now) if self.parked else []
        if stalled and not is_kv_short(slots, settled.views(slots)):
            self.stalled = stalled
            self._on_turn |= {view.adapter_id for view in stalled}

    def forget(self, adapter_id: AdapterId) -> None:
        self._on_turn.discard(adapter_id)

    @property
    def has_promise(self) -> bool:
        return self._max_stall_s is not None

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
        return self._max_stall_s is None or self._round_s(slots) < self._max_stall_s

    def _able(self, slots: SlotsView, settled: Settled) -> list[AdapterView]:
        """The first newcomers that lack nothing but a slot, and whose KV leaves settled adapters room to finish."""
        settled_blocks = sum(view.blocks for view in settled.views(slots))
        spare = max(PART_FOR_PARKED * slots.blocks, slots.blocks - 2 * settled_blocks)
        spare -= slots.adapter_blocks - settled_blocks
        able: list[AdapterView] = []
        passed_over = 0
        for view in slots.absent.newcomers:
            if passed_over == VISITS_AHEAD or len(able) == MOST_NEWCOMERS:
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

    def promisable_s(self, slots: SlotsView, settled: Settled) -> float:
        """The shortest pause that could be promised to all that are parked now; infinity while KV is short."""
        if slots.absent and is_kv_short(slots, settled.views(slots)):
            return math.inf
        turns_s = self._round_of(promised_turn_s(self._turn_s, slots.step_s), slots)
        return max(least_promise_s(slots.step_s, slots.copy_s, self._turn_s), turns_s)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _without_a_token(self, slots: SlotsView, settled: Settled, now: float) -> list[AdapterView]:
        """Parked adapters whose pause is long enough for a turn, the longest first."""
        stall_s = self._stall_s(slots, settled)
        goes_by_readers = self._is_crowd and self._max_stall_s is None and not settled.shares
        dry_s = PART_FOR_THE_DRY * stall_s if goes_by_readers else stall_s
        most = most_visits(slots)
        stalled: list[AdapterView] = []
        for view in islice(slots.absent.stalest, MOST_LOOKS):
            pause_s = now - view.ran_at
            if pause_s <= dry_s or len(stalled) == most:
                break
            if pause_s <= stall_s and view.stands_since >= now:
                continue  # its readers have text
            if view.adapter_id not in settled and view not in self.newcomers and slots.is_at_hand(view.adapter_id):
                stalled.append(view)
        return stalled

    def _stall_s(self, slots: SlotsView, settled: Settled) -> float:
        """How long a parked adapter goes without a token before its turn."""
        if self._max_stall_s is not None:
            return PROMISED_PART * self._max_stall_s  # weights break no promise
        few_s = STALL_STEPS * slots.step_s
        if settled.shares:
            return MOST_RARE * few_s
        return max(few_s, self._round_s(slots)) if self._is_crowd else few_s

    def _round_s(self, slots: SlotsView) -> float:
        """How long it takes until each parked adapter has had a turn."""
        return self._round_of(self._turn_s or self._turn_steps * slots.step_s, slots)

    def _round_of(self, turn_s: float, slots: SlotsView) -> float:
        return self.parked * (turn_s + slots.step_s) / (most_visits(slots) * PART_FOR_TURNS)


# ── leavers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Leavers are the residents that may leave for a visit, or for a settled adapter that comes back.


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
        # Some of those that are there are in slots that have closed.
        self._most_visitors = most_visits(slots) + slots.surplus
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
        self._now = now
        self._unsorted: tuple[list[AdapterView], ...] = (self._free, self._steady)

    def for_settled(self) -> AdapterView | None:
        """A settled adapter comes back when a visit is over."""
        return self._pop(self._free) if self._free else None

    def for_newcomer(self) -> AdapterView | None:
        """For a first token a settled adapter steps aside, the smallest claim first."""
        return self._leaver(self._visitors, (self._free, self._on_turn, self._steady))

    def for_stalled(self) -> AdapterView | None:
        """As for a newcomer, but no other turn is cut short."""
        return self._leaver(self._visitors + len(self._on_turn), (self._free, self._steady))

    def _leaver(self, visitors: int, lines: tuple[list[AdapterView], ...]) -> AdapterView | None:
        """For one visitor more beside so many."""
        if visitors >= self._most_visitors or not (line := next(filter(None, lines), None)):
            return None
        self._visitors += 1
        return self._pop(line)

    def _pop(self, line: list[AdapterView]) -> AdapterView:
        """Claims are compared only when a resident leaves; in most passes none does. The smallest goes first."""
        for views in self._unsorted:
            by_claim(views, self._now)
        self._unsorted = ()
        return line.pop()


def by_claim(views: list[AdapterView], now: float) -> None:
    """Sort them, the largest claim first."""
    if len(views) > 1:
        views.sort(key=lambda view: (-view.claim(now) * view.weight, view.adapter_id))


def _has_prompts(slots: SlotsView, view: AdapterView, late_since: float) -> bool:
    """Does it compute a prompt, or is it about to start one?"""
    return view.is_prefilling or (view.oldest_at < late_since and slots.can_start(view.adapter_id))
