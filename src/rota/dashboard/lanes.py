"""Lanes remember which adapter was in which slot over the last minute, and which drained for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from rota.core.events import DrainChanged, DrainState, SlotChanged, SlotState
from rota.core.ids import AdapterId, EngineId, Slot
from rota.dashboard.frame import DrainShown, Tenure

KEPT_S = 65.0  # a little more than the page shows
# A limit for any number of slots: 32 slots that change adapters ten times a second reach it in 30 seconds.
MOST_TENURES = 20_000
MOST_DRAINS = 500


class Lanes:
    """`ended` counts all ended tenures, so that a reader can ask for the ones it has not seen."""

    def __init__(self) -> None:
        self.ended = 0
        self._residents: dict[tuple[EngineId, Slot], Tenure] = {}
        self._past: deque[Tenure] = deque(maxlen=MOST_TENURES)
        self._drains: dict[tuple[EngineId, AdapterId], DrainShown] = {}  # by victim
        self._past_drains: deque[DrainShown] = deque(maxlen=MOST_DRAINS)

    @property
    def residents(self) -> tuple[Tenure, ...]:
        return tuple(self._residents.values())

    def ready(self) -> set[tuple[EngineId, AdapterId]]:
        """The adapters that may run: each is ready in a slot of its engine."""
        return {(one.engine, one.adapter) for one in self._residents.values() if one.state is SlotState.READY}

    @property
    def drains(self) -> tuple[DrainShown, ...]:
        return (*self._past_drains, *self._drains.values())

    def hear(self, event: SlotChanged | DrainChanged) -> None:
        if isinstance(event, SlotChanged):
            self._change_slot(event)
        else:
            self._change_drain(event)

    def _change_slot(self, event: SlotChanged) -> None:
        place = (event.engine_id, event.slot)
        before = self._end(place, event.at)
        if event.state is SlotState.EMPTY:
            return
        # A completed copy has no reason of its own: the reason of its load still holds.
        is_same = before is not None and before.adapter == event.adapter_id
        reason = event.reason or (before.reason if before and is_same else "")
        self._residents[place] = Tenure(
            slot=event.slot,
            adapter=event.adapter_id,
            state=event.state,
            reason=reason,
            begun_at=event.at,
            engine=event.engine_id,
        )

    def _change_drain(self, event: DrainChanged) -> None:
        if event.state is DrainState.EXPIRED:
            return  # the drain had already finished; this event is about the slot that it left free
        victim = (event.engine_id, event.victim)
        if drain := self._drains.pop(victim, None):
            self._past_drains.append(replace(drain, state=event.state, ended_at=event.at))
        if event.state is DrainState.STARTED:
            self._drains[victim] = DrainShown(
                victim=event.victim,
                beneficiary=event.beneficiary,
                state=event.state,
                begun_at=event.at,
                engine=event.engine_id,
            )

    def clear(self, at: float, engine: EngineId) -> None:
        """An engine is gone, and all its slots with it."""
        for place in [place for place in self._residents if place[0] == engine]:
            self._end(place, at)
        for victim in [victim for victim in self._drains if victim[0] == engine]:
            drain = self._drains.pop(victim)
            self._past_drains.append(replace(drain, state=DrainState.CALLED_OFF, ended_at=at))

    def forget(self, now: float) -> None:
        """Drop tenures and drains that ended too long ago to be shown."""
        pasts: tuple[deque[Tenure] | deque[DrainShown], ...] = (self._past, self._past_drains)
        for past in pasts:
            while past and (past[0].ended_at or 0.0) < now - KEPT_S:
                past.popleft()

    def since(self, seen: int) -> Iterator[Tenure]:
        """Tenures that ended after the first `seen` ones, as far as they are kept."""
        known = len(self._past)
        return islice(self._past, max(0, known - (self.ended - seen)), known)

    def _end(self, place: tuple[EngineId, Slot], at: float) -> Tenure | None:
        tenure = self._residents.pop(place, None)
        if tenure is not None:
            self._past.append(replace(tenure, ended_at=at))
            self.ended += 1
        return tenure
