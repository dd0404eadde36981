"""Slot pressure says when more adapters are busy than there are slots, and how long they wait for one.

It follows requests and slots, and no tokens. An adapter is absent from the moment it lost its slot, or from its first
request, until a slot is ready for it: so long its answers pause, or do not begin.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rota.core.events import EngineRestarted, Event, Finished, Moved, Produced, Routed, SlotChanged, SlotState
from rota.core.ids import BASE, FIRST_ENGINE, AdapterId, EngineId, RequestId

# Slots are judged once in so long.
WINDOW_S = 10.0
# Where one absence in ten lasts longer than a second, readers notice. Half as long ends it, so that nothing flaps.
SHARE, BEGINS_AT_S, ENDS_AT_S = 0.9, 1.0, 0.5
# A shortage begins and ends after so many windows in a row.
BEGINS_AFTER, ENDS_AFTER = 2, 3
# A shortage that lasts, or comes back, is told again after so long.
TELL_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class SlotShortage:
    """An engine's slots are too few for its traffic."""

    engine_id: EngineId
    busy: float  # adapters with open requests, in the mean
    slots: int
    wait_s: float  # one absence in ten lasts longer
    slot_bytes: int  # what one more slot would take; 0: not known

    def __str__(self) -> str:
        takes = (
            f"{self.slot_bytes / 1e6:,.0f} MB on the device" if self.slot_bytes else "the memory of one more adapter"
        )
        return (
            f"More adapters are busy than there are slots: {self.busy:.0f} on {self.slots}. Of their waits for a slot, "
            f"one in ten lasts longer than {self.wait_s:.1f} s; so long their answers pause or do not begin. One more "
            f"slot (--max-loras-per-batch) takes {takes}."
        )


class _EngineSlots:
    """What is known of one engine's adapters."""

    def __init__(self) -> None:
        self.busy: Counter[AdapterId] = Counter()  # open requests
        self.ready: set[AdapterId] = set()
        self.absent: dict[AdapterId, float] = {}  # adapters with requests and without a slot, since when
        self.shortage: SlotShortage | None = None
        self.told_at = -math.inf
        self._absences: list[float] = []  # in this window
        self._busy_s = self._counted_at = 0.0  # the sum of the times that adapters were busy in this window
        self._streak = 0  # windows in a row that speak against the present judgement

    def count(self, adapter: AdapterId, by: int, at: float) -> None:
        self._sum_up(at)
        self.busy[adapter] += by
        if self.busy[adapter] <= 0:
            del self.busy[adapter]
            self.absent.pop(adapter, None)
        elif adapter not in self.ready:
            self.absent.setdefault(adapter, at)

    def change(self, adapter: AdapterId, state: SlotState, at: float) -> None:
        if state is SlotState.READY:
            self.ready.add(adapter)
            if adapter in self.absent:
                self._absences.append(at - self.absent.pop(adapter))
        elif state is SlotState.EMPTY:
            self.ready.discard(adapter)
            if adapter in self.busy:
                self.absent[adapter] = at

    def restart(self, at: float) -> None:
        """No adapter is in a slot any more."""
        self.ready.clear()
        self.absent = dict.fromkeys(self.busy, at)

    def judge(self, engine_id: EngineId, slots: int, slot_bytes: int, at: float) -> None:
        """A window has ended. An engine that is down has no slots."""
        self._sum_up(at)
        busy, self._busy_s = self._busy_s / WINDOW_S, 0.0
        absences = sorted([*self._absences, *(at - since for since in self.absent.values())])
        self._absences = []
        wait_s = absences[math.ceil(SHARE * len(absences)) - 1] if absences else 0.0
        was_short = self.shortage is not None
        is_short = busy > slots > 0 and wait_s > (ENDS_AT_S if was_short else BEGINS_AT_S)
        self._streak = 0 if is_short is was_short else self._streak + 1
        if self._streak >= (ENDS_AFTER if was_short else BEGINS_AFTER):
            self._streak, was_short, self.shortage = 0, not was_short, None
        if was_short and is_short:
            self.shortage = SlotShortage(engine_id, busy, slots, wait_s, slot_bytes)

    def _sum_up(self, at: float) -> None:
        self._busy_s += max(0.0, at - self._counted_at) * len(self.busy)
        self._counted_at = max(at, self._counted_at)


class SlotPressure:
    """An observer. `slots_of` says how many slots an engine has, and how many bytes one more would take.

    `tell` hears of shortages, seldom.
    """

    def __init__(
        self,
        slots_of: Callable[[EngineId], tuple[int, int]],
        tell: Callable[[SlotShortage], None] = lambda _: None,
    ) -> None:
        self._slots_of, self._tell = slots_of, tell
        self._engines: defaultdict[EngineId, _EngineSlots] = defaultdict(_EngineSlots)
        self._open: dict[RequestId, tuple[EngineId, AdapterId]] = {}
        self._judged_at: float | None = None
        self.worst: SlotShortage | None = None  # of all times

    def shortages(self, now: float) -> dict[EngineId, SlotShortage]:
        """Of the engines whose slots are too few."""
        self.advance(now)
        return {engine_id: one.shortage for engine_id, one in self._engines.items() if one.shortage}

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        if adapter != BASE:
            self._place(request_id, FIRST_ENGINE, adapter, at)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Produced(at=at):
                    self.advance(at)
                case SlotChanged(engine_id=engine_id, adapter_id=adapter, state=state, at=at):
                    self.advance(at)
                    self._engines[engine_id].change(adapter, state, at)
                case Finished(request_id=request_id, at=at):
                    self._leave(request_id, at)
                case Routed(request_id=request_id, engine_id=engine_id, at=at):
                    self._move(request_id, at, engine_id=engine_id)
                case Moved(request_id=request_id, new=new, at=at):
                    self._move(request_id, at, adapter=new)
                case EngineRestarted(engine_id=engine_id, at=at):
                    self._engines[engine_id].restart(at)

    def advance(self, now: float) -> None:
        """Judge the windows that have ended."""
        if self._judged_at is None:
            self._judged_at = now
        while now - self._judged_at >= WINDOW_S:
            self._judged_at += WINDOW_S
            for engine_id, engine in self._engines.items():
                engine.judge(engine_id, *self._slots_of(engine_id), self._judged_at)
                if shortage := engine.shortage:
                    self.worst = max(self.worst or shortage, shortage, key=lambda one: one.wait_s)
                    if self._judged_at - engine.told_at >= TELL_EVERY_S:
                        engine.told_at = self._judged_at
                        self._tell(shortage)

    def _place(self, request_id: RequestId, engine_id: EngineId, adapter: AdapterId, at: float) -> None:
        self._leave(request_id, at)  # a name may come again
        self._open[request_id] = engine_id, adapter
        self._engines[engine_id].count(adapter, 1, at)

    def _leave(self, request_id: RequestId, at: float) -> None:
        if place := self._open.pop(request_id, None):
            self._engines[place[0]].count(place[1], -1, at)

    def _move(
        self, request_id: RequestId, at: float, engine_id: EngineId | None = None, adapter: AdapterId | None = None
    ) -> None:
        if place := self._open.get(request_id):
            self._place(request_id, place[0] if engine_id is None else engine_id, adapter or place[1], at)
