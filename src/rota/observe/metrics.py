"""Metrics follow every open request and turn its events into numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from rota.core.adapter import BASE_LABEL, OTHER_LABEL
from rota.core.errors import FaultCode
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Admitted,
    DrainChanged,
    EngineRestarted,
    Event,
    Finished,
    FinishReason,
    PauseChanged,
    Preempted,
    PrefillsReleased,
    Produced,
    Routed,
    SlotChanged,
    SlotReason,
    SlotState,
)
from rota.core.ids import BASE, FIRST_ENGINE, AdapterId, EngineId, RequestId, Slot
from rota.core.policy_config import READER_PACE
from rota.core.standstill import StoodStill
from rota.observe.journey import Journey, OnEnd, TraceHeaders
from rota.observe.meters import (
    MOST_ADAPTERS,
    MOST_KEYS,
    AdapterMeters,
    ConnectionMeters,
    EngineMeters,
    KeyMeters,
    Places,
    TrafficMeters,
    count,
)
from rota.observe.slot_pressure import SlotShortage


class Metrics:
    """An observer whose numbers are read by `exposition`."""

    def __init__(
        self,
        name_of: Callable[[AdapterId], str | None],
        most_adapters: int = MOST_ADAPTERS,
        on_end: OnEnd | None = None,
        most_keys: int = MOST_KEYS,
        engines: Iterable[EngineId] = (FIRST_ENGINE,),
        traffic: TrafficMeters | None = None,
        reader_pace: float = READER_PACE,
    ) -> None:
        self.name_of = name_of  # the name by which clients ask for an adapter; None once the adapter is unloaded
        self._on_end = on_end
        self._read_s = 1.0 / reader_pace if reader_pace else None  # that a reader takes for a token; None: nobody reads
        self._labels = {BASE: BASE_LABEL}
        self.adapters = Places(most_adapters, AdapterMeters, always=(BASE_LABEL,))
        self.keys = Places(most_keys, KeyMeters)  # empty on a server without keys
        self.engines: defaultdict[EngineId, EngineMeters] = defaultdict(EngineMeters)
        self.meet(engines)
        self.connections = ConnectionMeters()  # changed by the server that listens
        self.traffic = traffic or TrafficMeters()
        self.journeys: dict[RequestId, Journey] = {}
        self.slots: dict[tuple[EngineId, Slot], SlotChanged] = {}  # the last change of each slot
        self.loaded: set[AdapterId] = set()
        self.lost: set[AdapterId] = set()  # a restarted engine could not read them again
        self.quarantined: Callable[[], int] = int  # how many are; the server knows
        self.shortages: Callable[[], dict[EngineId, SlotShortage]] = dict  # of slots; the server knows them too
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Routed: self._routed,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Produced: self._produced,
            Finished: self._finished,
            AdapterAdded: self._added,
            AdapterRefused: self._refused,
            AdapterRemoved: self._gone,
            SlotChanged: self._slot_changed,
            DrainChanged: self._drain_changed,
            PrefillsReleased: self._released,
            EngineRestarted: self._restarted,
            PauseChanged: self._pause_changed,
            StoodStill: self._stood_still,
        }

    def meters_of(self, adapter: AdapterId) -> AdapterMeters:
        """The meters that count an adapter now."""
        return self.adapters.find(self._label(adapter))

    def with_places(self) -> tuple[AdapterId, ...]:
        """The adapters that have meters of their own and were asked for."""
        has_own = self.adapters.has_own
        return tuple([one for one, label in self._labels.items() if has_own(label)])

    def in_slots(self, engine_id: EngineId) -> list[str]:
        """The names of the adapters in an engine's slots, by slot."""
        own = {slot: change.adapter_id for (engine, slot), change in self.slots.items() if engine == engine_id}
        return [self._label(own[slot]) for slot in sorted(own)]

    def meet(self, engines: Iterable[EngineId]) -> None:
        """Count from zero for these engines, and not from their first events. Engines may join at any time."""
        for engine_id in engines:
            _ = self.engines[engine_id]

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        label = self._labels[adapter] = self._label(adapter)
        self.journeys[request_id] = Journey(adapter, label, at, self.adapters.begin(label, at))

    def owned(
        self, request_ids: Iterable[RequestId], owner: str, call: str, tenant: str = "", trace: TraceHeaders = ()
    ) -> None:
        """Note the key that sent these open requests, the client's name for the call, and its trace.

        `tenant` is the key's name too, and empty on a server without keys.
        """
        for request_id in request_ids:
            if journey := self.journeys.get(request_id):
                journey.owner, journey.call, journey.trace = owner, call, trace
                if tenant:
                    journey.key_meters = self.keys.begin(tenant, journey.asked_at)

    def routed(self, request_ids: Iterable[RequestId], name: str, target: str) -> None:
        """Note the name whose traffic route chose the adapter of these open requests, and the target in it."""
        for request_id in request_ids:
            if journey := self.journeys.get(request_id):
                journey.target_meters = self.traffic.asked(name, target, journey.asked_at)

    def limit_met(self, key: str, limit: str, at: float) -> None:
        """A call has met a limit of its key, and no request is made of it."""
        count(self.keys.take(key, at).limits_met, limit)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if handle := self._handlers.get(type(event)):
                handle(event)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _routed(self, event: Routed) -> None:
        count(self.engines[event.engine_id].routes, event.reason)
        if journey := self.journeys.get(event.request_id):
            journey.engine_id, journey.route = event.engine_id, event.reason

    def _admitted(self, event: Admitted) -> None:
        journey = self.journeys.get(event.request_id)
        if journey is None or journey.admitted_at is not None:  # it was preempted, and is admitted again
            return
        journey.admitted_at, journey.reasons = event.at, event.reasons
        for meters in (journey.meters, journey.key_meters):
            if meters:
                meters.queue_wait.add(event.at - journey.asked_at)

    def _preempted(self, event: Preempted) -> None:
        if journey := self.journeys.get(event.request_id):
            journey.meters.preemptions += 1
            journey.preemptions += 1

    def _produced(self, event: Produced) -> None:
        """Only this handler works for every token."""
        engine = self.engines[event.engine_id]
        engine.step_time.add(event.step_s)
        engine.computed_tokens += event.prompt_tokens
        at, journeys, read_s = event.at, self.journeys, self._read_s or math.inf
        for request_id in event.request_ids:
            journey = journeys.get(request_id)
            if journey is None:
                continue
            if journey.first_at is None:
                journey.first_at = at
                journey.meters.ttft.add(at - journey.asked_at)
            else:
                journey.meters.token_gap.add(at - journey.last_at)
                if at > journey.read_until:
                    journey.stalled_s = max(journey.stalled_s, at - journey.read_until)
            journey.last_at = at
            journey.read_until = max(at, journey.read_until) + read_s
            journey.tokens += 1
            journey.meters.output_tokens += 1
            if journey.key_meters:
                journey.key_meters.output_tokens += 1

    def _finished(self, event: Finished) -> None:
        if (journey := self.journeys.pop(event.request_id, None)) is None:
            return
        meters, of_key, of_target = journey.meters, journey.key_meters, journey.target_meters
        outcome = event.fault.code.value if event.fault else event.reason.value
        self.adapters.end(meters, outcome, event.at)
        if of_key:
            self.keys.end(of_key, outcome, event.at)
        if of_target:
            self.traffic.targets.end(of_target, outcome, event.at)
            if journey.first_at is not None:
                of_target.ttft.add(journey.first_at - journey.asked_at)
        if journey.admitted_at is not None:
            meters.prompt_tokens += event.prompt_tokens
            meters.cached_tokens += event.cached_tokens
            if of_key:
                of_key.prompt_tokens += event.prompt_tokens
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._answered(journey, event.at)
        if event.fault and event.fault.code is FaultCode.UNKNOWN_ADAPTER:
            self._labels.pop(journey.adapter_id, None)  # the request came after the adapter's removal
        if self._on_end:
            self._on_end(event.request_id, journey, event)

    def _answered(self, journey: Journey, at: float) -> None:
        journey.meters.e2e.add(at - journey.asked_at)
        if self._read_s is not None and journey.first_at is not None:
            journey.meters.stall.add(journey.stalled_s)

    # ── adapters ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _label(self, adapter: AdapterId) -> str:
        """An adapter's name, kept from its first request on: the name may be gone before the last request ends."""
        return self._labels.get(adapter) or self.name_of(adapter) or OTHER_LABEL

    def _added(self, event: AdapterAdded) -> None:
        self.loaded.add(event.adapter_id)
        self.lost.discard(event.adapter_id)

    def _refused(self, event: AdapterRefused) -> None:
        # An unloaded name is gone before its adapter is; an adapter that was never read cannot be lost.
        was_read = event.adapter_id in self.loaded or event.adapter_id in self.lost
        if self.name_of(event.adapter_id) is None or not was_read:
            return self._gone(event)
        self.engines[event.engine_id].losses += 1
        if not event.others_serve:
            self.loaded.discard(event.adapter_id)
            self.lost.add(event.adapter_id)

    def _gone(self, event: AdapterRefused | AdapterRemoved) -> None:
        self.loaded.discard(event.adapter_id)
        self.lost.discard(event.adapter_id)
        if event.adapter_id != BASE and (label := self._labels.pop(event.adapter_id, None)):
            self.adapters.release(label)

    def _slot_changed(self, event: SlotChanged) -> None:
        meters = self.meters_of(event.adapter_id)
        place = (event.engine_id, event.slot)
        before = self.slots.get(place)
        if event.state is SlotState.EMPTY:
            meters.evictions += 1
            self.slots.pop(place, None)
            return
        self.slots[place] = event
        if event.state is SlotState.LOADING:
            meters.loads += 1
            self.engines[event.engine_id].rotations += event.reason is SlotReason.TURN_COME
        elif before:
            self.engines[event.engine_id].load_time.add(event.at - before.at)

    # ── policies and engines ─────────────────────────────────────────────────────────────────────────────────────

    def _drain_changed(self, event: DrainChanged) -> None:
        count(self.engines[event.engine_id].drains, event.state.value)

    def _released(self, event: PrefillsReleased) -> None:
        engine = self.engines[event.engine_id]
        count(engine.delays, event.reason)
        if event.passes:
            engine.delay_passes.add(event.passes)
            engine.delay_wait.add(event.waited_s)

    def _pause_changed(self, event: PauseChanged) -> None:
        self.engines[event.engine_id].is_paused = event.is_paused

    def _stood_still(self, event: StoodStill) -> None:
        if event.is_news:
            count(self.engines[event.engine_id].standstills, event.kind)

    def _restarted(self, event: EngineRestarted) -> None:
        self.engines[event.engine_id].restarts += 1
        self.engines[event.engine_id].is_paused = False  # a new engine says so itself
        self.slots = {place: change for place, change in self.slots.items() if place[0] != event.engine_id}
