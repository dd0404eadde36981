"""The feed follows events and makes frames of them, at a cost that does not depend on the traffic."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from rota.core.adapter import Adapter
from rota.core.events import (
    AdapterRemoved,
    AdapterStanding,
    Admitted,
    DrainChanged,
    EngineRestarted,
    Event,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
    Inspected,
    PauseChanged,
    Preempted,
    Produced,
    SlotChanged,
)
from rota.core.ids import BASE, AdapterId, EngineId, RequestId
from rota.core.policy_config import READER_PACE
from rota.dashboard.frame import AdapterRow, EngineFrame, Frame, TargetRow
from rota.dashboard.lanes import Lanes
from rota.dashboard.tenants import Tenants, Trouble
from rota.dashboard.window import SPANS_S, ChartWindow, Span, bucket_of
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.traffic.route import Route

# ── standings ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Standings of the same adapter on several engines become one, as the page shows an adapter once.


def merged(standings: Iterable[AdapterStanding]) -> dict[AdapterId, AdapterStanding]:
    """The sums by adapter; the reason is that of the request that has waited longest."""
    found: dict[AdapterId, AdapterStanding] = {}
    for one in standings:
        before = found.get(one.adapter_id)
        found[one.adapter_id] = _together(before, one) if before else one
    return found


def _together(one: AdapterStanding, other: AdapterStanding) -> AdapterStanding:
    return replace(
        min(one, other, key=lambda standing: math.inf if standing.oldest_at is None else standing.oldest_at),
        waiting=one.waiting + other.waiting,
        running=one.running + other.running,
        parked=one.parked + other.parked,
    )


# ── whereabouts ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Where an adapter lies that is in no slot: in host memory, on its way there, on disk, or at its source.


class AdapterWhereabouts:
    """Follows reads and drops of every engine. An adapter that was never read takes no memory."""

    def __init__(self) -> None:
        self._states: dict[AdapterId, dict[EngineId, HostState]] = {}

    def hear(self, event: HostChanged | AdapterRemoved) -> None:
        if isinstance(event, AdapterRemoved):
            self._states.pop(event.adapter_id, None)
        else:
            self._states.setdefault(event.adapter_id, {})[event.engine_id] = event.state

    def clear(self, engine: EngineId) -> None:
        """An engine is down, and its memory with it."""
        for states in self._states.values():
            if engine in states:
                states[engine] = HostState.GONE

    def of(self, adapter: Adapter) -> str:
        """`host`, `reading`, `disk` or `source`: the nearest, over all engines."""
        states = self._states.get(adapter.adapter_id, {}).values()
        if HostState.HELD in states:
            return "host"
        if HostState.READING in states:
            return "reading"
        # What was read from afar once was kept on disk.
        return "disk" if states or not adapter.is_far else "source"


# ── traffic ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Traffic on the page: a row for each target of each name whose requests are sent by weight.

MOST_TARGETS = 40


def target_rows(routes: Iterable[Route]) -> tuple[TargetRow, ...]:
    return tuple(islice((row for route in routes for row in _rows(route)), MOST_TARGETS))


def _rows(route: Route) -> Iterator[TargetRow]:
    note = route.note
    for target, weight in route.weights.items():
        requests = route.requests.get(target, 0)
        yield TargetRow(name=route.name, target=target, weight=weight, requests=requests, note=note)
        note = ""  # once for a name
    if route.shadow:
        yield TargetRow(name=route.name, target=route.shadow, weight=None, requests=0, note="copies; answers dropped")


MOST_ROWS = 40
MOST_OPEN = 100_000


@dataclass(slots=True)
class OpenRequest:
    """An open request, and the time of its last token, or of its arrival before the first token."""

    sharers: tuple[AdapterId, str]  # its adapter and its tenant
    last_at: float
    read_until: float = 0.0  # when its reader has read the text so far
    stalled_s: float = 0.0  # the longest time that this reader stood without text
    is_begun: bool = False
    is_admitted: bool = False


@dataclass(frozen=True, slots=True)
class AlreadySent:
    """How much a reader has already been sent."""

    tenures: int = 0
    charts: int = -1  # nothing yet


class Feed:
    """An observer. It runs on the event loop's thread only."""

    def __init__(self, registry: Registry, state: Callable[[], ServiceState], reader_pace: float = READER_PACE) -> None:
        self._registry = registry
        self._reader_pace = reader_pace
        self._read_s = 1.0 / reader_pace if reader_pace else math.inf  # that a reader takes for a token
        self.routes: Callable[[], Iterable[Route]] = tuple  # the server sets it, once it has traffic
        self._whereabouts = AdapterWhereabouts()
        self._state = state
        self._open: dict[RequestId, OpenRequest] = {}
        self._window = ChartWindow()
        self._lanes = Lanes()
        self._tenants = Tenants()
        self._trouble = Trouble()
        self._inspected: dict[EngineId, Inspected] = {}

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        self._end(request_id)  # a name may come again
        request = self._open[request_id] = OpenRequest((adapter, tenant), at)
        self._count(request, 1)
        if len(self._open) > MOST_OPEN:
            # A request that a dead engine never took gets no Finished event.
            self._end(next(iter(self._open)))

    def note_error(self, kind: str, sentence: str, at: float | None = None) -> None:
        """A client was told of an error, just now unless `at` says when. The sentence must quote no client."""
        at = time.monotonic() if at is None else at
        self._window.roll(at)
        if self._trouble.note(kind, sentence, at):
            self._window.open.errors[kind] += 1

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Produced():
                    self._note_step(event)
                case Admitted(request_id=request_id) | Preempted(request_id=request_id):
                    self._admit(request_id, isinstance(event, Admitted))
                case Finished(request_id=request_id, reason=reason):
                    self._end(request_id, is_answered=reason in (FinishReason.STOP, FinishReason.LENGTH))
                case EngineRestarted() | PauseChanged():
                    self._trouble.hear(event)
                case SlotChanged():
                    self._lanes.change_slot(event)
                case DrainChanged():
                    self._lanes.change_drain(event)
                case HostChanged() | AdapterRemoved():
                    self._whereabouts.hear(event)
                case Inspected(is_whole=True):
                    self._inspected[event.engine_id] = event

    def advance(self, now: float) -> None:
        """Drop what is too old to show at `now`, and the state of engines that are gone."""
        for engine in self._state().engines:
            if engine.phase in (ServicePhase.STARTING, ServicePhase.DOWN):
                self._lanes.clear(now, engine.engine_id)
                self._whereabouts.clear(engine.engine_id)
                self._inspected.pop(engine.engine_id, None)
        self._window.roll(now)
        self._lanes.forget(now)

    def frame(
        self, now: float, seen: AlreadySent, may_load: bool = False, window_s: int = SPANS_S[0]
    ) -> tuple[Frame, AlreadySent]:
        """The frame for a reader, and what that reader has seen after it. Call `advance` first."""
        state, inspected = self._state(), self._inspected.values()
        span = self._window.spans[window_s]
        tokens_per_s, prompt_tokens_per_s = self._window.rates(now)
        ready = self._lanes.ready()
        standings = merged(_up_to_date(one, engine.engine_id, ready) for engine in inspected for one in engine.adapters)
        rows, unlisted = self._rows(standings, span)
        tenants, unlisted_tenants = self._tenants.rows(span, {BASE, *(adapter for _, adapter in ready)})
        paused = self._trouble.paused
        engines = tuple(_engine_frame(one, one.engine_id in paused, now) for one in state.engines)
        frame = Frame(
            now=now,
            phase=state.phase.value,
            phase_reason=state.reason,
            model=self._registry.base.name,
            may_load=may_load,
            engines=engines,
            slots=sum(engine.slots for engine in engines),
            rows=sum(engine.capacity.rows for engine in state.engines if engine.capacity),
            blocks=sum(engine.blocks for engine in inspected),
            blocks_used=sum(engine.blocks_used for engine in inspected),
            waiting=sum(one.waiting for one in standings.values()),
            running=sum(one.running for one in standings.values()),
            parked=sum(one.parked for one in standings.values()),
            tokens_per_s=tokens_per_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            window_s=window_s,
            mean_tokens_per_s=span.tokens_per_s,
            mean_prompt_tokens_per_s=span.prompt_tokens_per_s,
            ttft=span.ttft,
            gap=span.gap,
            step=span.step,
            stall=span.stall,
            reader_pace=self._reader_pace,
            residents=self._lanes.residents,
            is_whole=seen == AlreadySent(),
            tenures=tuple(self._lanes.since(seen.tenures)),
            drains=self._lanes.drains,
            adapters=rows,
            unlisted=unlisted,
            targets=target_rows(self.routes()),
            tenants=tenants,
            unlisted_tenants=unlisted_tenants,
            errors=self._trouble.errors(span),
            restarts=tuple(self._trouble.restarts),
            restarts_total=self._trouble.restarts_total,
            charts=self._window.charts(window_s) if seen.charts != self._window.closed else None,
        )
        return frame, AlreadySent(self._lanes.ended, self._window.closed)

    def _note_step(self, event: Produced) -> None:
        self._window.roll(event.at)
        window = self._window.open
        window.tokens += len(event.request_ids)
        window.prompt_tokens += event.prompt_tokens
        if event.step_s:
            window.step[bucket_of(event.step_s)] += 1
        # This loop is the only code here that runs for every token, also without a reader. Most rows of a step got
        # their last token at the same time, so gaps are counted first and entered once.
        gaps: defaultdict[float, int] = defaultdict(int)
        tokens: defaultdict[tuple[AdapterId, str], int] = defaultdict(int)
        for request_id in event.request_ids:
            request = self._open.get(request_id)
            if request is None:
                continue  # dropped above, because too many were open
            tokens[request.sharers] += 1
            if request.is_begun:
                gaps[request.last_at] += 1
                request.stalled_s = max(request.stalled_s, event.at - request.read_until)
            else:
                bucket = bucket_of(event.at - request.last_at)
                window.ttft[bucket] += 1
                for sharer in request.sharers:
                    window.shares[sharer].ttft[bucket] += 1
                request.is_begun = True
            request.last_at = event.at
            request.read_until = max(event.at, request.read_until) + self._read_s
        for last_at, count in gaps.items():
            window.gap[bucket_of(event.at - last_at)] += count
        for sharers, count in tokens.items():
            for sharer in sharers:
                window.shares[sharer].tokens += count

    def _admit(self, request_id: RequestId, is_admitted: bool) -> None:
        request = self._open.get(request_id)
        if request is None or request.is_admitted == is_admitted:
            return
        self._count(request, -1)
        request.is_admitted = is_admitted
        self._count(request, 1)

    def _end(self, request_id: RequestId, is_answered: bool = False) -> None:
        if request := self._open.pop(request_id, None):
            self._count(request, -1)
            if is_answered and request.is_begun and self._reader_pace:
                self._window.open.stall[bucket_of(request.stalled_s)] += 1

    def _count(self, request: OpenRequest, by: int) -> None:
        adapter, tenant = request.sharers
        self._tenants.count(tenant, adapter if request.is_admitted else None, by)

    def _rows(self, standings: Mapping[AdapterId, AdapterStanding], span: Span) -> tuple[tuple[AdapterRow, ...], int]:
        """One row per adapter, by id. If there are too many, adapters in slots or with requests go first."""
        others = self._registry.others
        loaded = {one.adapter_id: one for one in (self._registry.base, *self._registry.adapters, *others)}
        # An adapter that was just unloaded may still have requests or a slot.
        seated = {tenure.adapter for tenure in self._lanes.residents}
        busy = {BASE, *standings, *seated}
        # Of thousands that are idle, only the first are looked at: frames are made four times a second.
        ids = sorted(
            busy | {*islice(loaded, MOST_ROWS)},
            key=lambda id: (id != BASE, id not in seated, not _users(standings.get(id)), id),
        )
        former = {one.adapter_id for one in others}
        rows = [self._row(id, loaded.get(id), standings.get(id), span, former) for id in sorted(ids[:MOST_ROWS])]
        return tuple(rows), len(loaded.keys() | busy) - len(rows)

    def _row(
        self,
        id: AdapterId,
        adapter: Adapter | None,
        standing: AdapterStanding | None,
        span: Span,
        former: Container[AdapterId],
    ) -> AdapterRow:
        figures = span.figures_of(id)
        standing = standing or AdapterStanding(adapter_id=id, waiting=0, running=0, parked=0, oldest_at=None, reason="")
        return AdapterRow(
            id=id,
            name=adapter.name if adapter else f"adapter {id}",
            path=adapter.path if adapter else "",
            is_loaded=adapter is not None,
            version=adapter.version if adapter else 1,
            is_current=id not in former,
            place=self._whereabouts.of(adapter) if adapter else "",
            waiting=standing.waiting,
            running=standing.running,
            parked=standing.parked,
            oldest_at=standing.oldest_at,
            reason=standing.outlook or standing.reason,
            ttft=figures.ttft,
            tokens_per_s=figures.tokens_per_s,
        )


def _up_to_date(
    standing: AdapterStanding, engine: EngineId, ready: Container[tuple[EngineId, AdapterId]]
) -> AdapterStanding:
    """Slots have changed since the engine answered. An adapter that is in a slot now runs; others are parked."""
    seated = standing.running + standing.parked
    is_ready = standing.adapter_id == BASE or (engine, standing.adapter_id) in ready
    outlook = "" if is_ready else standing.outlook
    return replace(standing, running=seated if is_ready else 0, parked=0 if is_ready else seated, outlook=outlook)


def _engine_frame(engine: ServiceState, is_paused: bool, now: float) -> EngineFrame:
    return EngineFrame(
        id=engine.engine_id,
        phase=engine.phase.value,
        slots=engine.capacity.slots if engine.capacity else 0,
        reason=engine.reason,
        is_paused=is_paused,
        standstill=engine.standstill.sentence(now) if engine.standstill else "",
    )


def _users(standing: AdapterStanding | None) -> int:
    return standing.waiting + standing.running + standing.parked if standing else 0
