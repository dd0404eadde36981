"""The feed follows events and makes frames of them, at a cost that does not depend on the traffic."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rota.core.adapter import Adapter
from rota.core.events import (
    AdapterRemoved,
    Admitted,
    DrainChanged,
    EngineRestarted,
    Event,
    Explained,
    Finished,
    FinishReason,
    HostChanged,
    HostState,
    Inspected,
    Moved,
    PauseChanged,
    Preempted,
    Produced,
    Routed,
    SlotChanged,
    SlotState,
    Whereabouts,
)
from rota.core.ids import BASE, AdapterId, EngineId, RequestId
from rota.core.policy_config import READER_PACE
from rota.core.version import __version__
from rota.dashboard.frame import AdapterRow, EngineFrame, Frame, RequestRow, TargetRow
from rota.dashboard.lanes import Lanes
from rota.dashboard.open_requests import FollowedRequests, OpenRequest, Ready, engine_sharer
from rota.dashboard.tenants import Trouble, UsedLimits, tenant_rows
from rota.dashboard.window import SPANS_S, ChartWindow, Span, bucket_of
from rota.observe.slot_pressure import SlotShortage
from rota.runtime.registry import Registry
from rota.runtime.service import ServicePhase, ServiceState
from rota.server.open_answers import name_in_id
from rota.server.traffic.route import Route

# ── whereabouts ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Where an adapter lies that is in no slot: in host memory, on its way there, on disk, or at its source.


class AdapterWhereabouts:
    """Follows reads and drops of every engine. An adapter that was never read takes no memory."""

    def __init__(self) -> None:
        self._states: dict[AdapterId, dict[EngineId, HostState]] = {}
        self.ranks: dict[AdapterId, int] = {}  # as first reads found them

    def hear(self, event: HostChanged | AdapterRemoved) -> None:
        if isinstance(event, AdapterRemoved):
            self._states.pop(event.adapter_id, None)
            self.ranks.pop(event.adapter_id, None)
            return
        self._states.setdefault(event.adapter_id, {})[event.engine_id] = event.state
        if event.rank:
            self.ranks[event.adapter_id] = event.rank

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


# ── notices ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# Notices are sentences that an operator should read before any figure.


def notices_of(state: ServiceState, shortages: Iterable[SlotShortage], now: float) -> tuple[str, ...]:
    """The engines that stand still, with what their requests wait for, and those whose slots are too few."""
    still = ((one.engine_id, one.standstill) for one in state.engines if one.standstill)
    stand = (f"Engine {engine} stands still. {one.sentence(now)}" for engine, one in still)
    return (*stand, *(str(one) if len(state.engines) == 1 else f"Replica {one.engine_id}: {one}" for one in shortages))


# ── feed ────────────────────────────────────────────────────────────────────────────────────────────────────────────

MOST_ROWS = 1000


@dataclass(frozen=True, slots=True)
class AlreadySent:
    """How much a reader has already been sent."""

    tenures: int = 0
    charts: int = -1  # nothing yet
    rows: Mapping[AdapterId, AdapterRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """What all readers of a moment share: who is in a slot, how requests stand, and why those of an adapter wait."""

    state: ServiceState
    ready: Ready = frozenset()
    counts: Mapping[Hashable, Counter[Whereabouts]] = field(default_factory=dict)
    reasons: Mapping[AdapterId, str] = field(default_factory=dict)
    rows: dict[int, dict[AdapterId, AdapterRow]] = field(default_factory=dict)  # by the time that figures are of


class Feed:
    """An observer. It runs on the event loop's thread only."""

    def __init__(self, registry: Registry, state: Callable[[], ServiceState], reader_pace: float = READER_PACE) -> None:
        self._registry = registry
        self._reader_pace = reader_pace
        self._read_s = 1.0 / reader_pace if reader_pace else math.inf  # that a reader takes for a token
        # The server sets these, once it is put together.
        self.routes: Callable[[], Iterable[Route]] = tuple
        self.shortages: Callable[[], Iterable[SlotShortage]] = tuple
        self.used_limits: UsedLimits = lambda _name, _admitted, _waiting: ()
        self._whereabouts = AdapterWhereabouts()
        self._state = state
        self._open = FollowedRequests()
        self._window = ChartWindow()
        self._lanes = Lanes()
        self._trouble = Trouble()
        self._inspected: dict[EngineId, Inspected] = {}
        self._slots: dict[EngineId, int] = {}  # of each engine when it last served
        self._moment = Moment(state())
        self._rows: dict[int, dict[AdapterId, AdapterRow]] = {}  # the last ones that were made

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, tenant: str = "") -> None:
        self._open.ask(request_id, adapter, at, tenant)
        self._hold()

    def note_error(self, kind: str, sentence: str, tenant: str = "", at: float | None = None) -> None:
        """A client was told of an error, just now unless `at` says when. The sentence must quote no client."""
        at = time.monotonic() if at is None else at
        self._window.roll(at)
        if self._trouble.note(kind, sentence, at):
            self._window.open.errors[kind] += 1
            if tenant:
                self._window.open.shares[tenant].errors[kind] += 1

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Produced():
                    self._note_step(event)
                case Admitted() | Preempted() | Routed() | Moved() | Explained():
                    self._open.hear(event)
                    self._hold()
                case Finished():
                    self._end(event)
                case EngineRestarted() | PauseChanged():
                    self._note_engine(event)
                case SlotChanged() | DrainChanged():
                    self._lanes.hear(event)
                    if isinstance(event, SlotChanged) and event.state is SlotState.LOADING:
                        self._window.open.shares[event.adapter_id].loads += 1
                case HostChanged() | AdapterRemoved():
                    self._whereabouts.hear(event)
                case Inspected(is_whole=True):
                    self._inspected[event.engine_id] = event

    def advance(self, now: float) -> None:
        """A new moment, for all readers: drop what is too old to show, and the state of engines that are gone."""
        state = self._state()
        for engine in state.engines:
            if engine.phase in (ServicePhase.STARTING, ServicePhase.DOWN):
                self._clear(engine.engine_id, now)
            if engine.capacity:
                self._slots[engine.engine_id] = engine.capacity.slots
        self._window.roll(now)
        self._lanes.forget(now)
        ready = self._lanes.ready()
        self._moment = Moment(state, ready, self._open.counted(ready), self._reasons(ready))

    def unclear(self) -> list[RequestId]:
        """The open requests that the page shows and that do not run: engines are asked why."""
        return [id for id, _, state in self._open.shown(self._moment.ready) if state is not Whereabouts.RUNNING]

    def frame(
        self, now: float, seen: AlreadySent, may_load: bool = False, window_s: int = SPANS_S[0]
    ) -> tuple[Frame, AlreadySent]:
        """The frame for a reader, and what that reader has seen after it. Call `advance` first."""
        state, counts, inspected = self._moment.state, self._moment.counts, self._inspected.values()
        span = self._window.spans[window_s]
        tokens_per_s, prompt_tokens_per_s = self._window.rates(now)
        rows, unlisted = self._rows_of(window_s)
        tenants, unlisted_tenants = tenant_rows(counts, span, self.used_limits)
        engines = tuple(self._engine_frame(one, span) for one in state.engines)
        requests = self._request_rows()
        frame = Frame(
            now=now,
            version=__version__,
            phase=state.phase.value,
            phase_reason=state.reason,
            model=self._registry.base.name,
            may_load=may_load,
            engines=engines,
            slots=sum(engine.slots for engine in engines),
            rows=sum(engine.capacity.rows for engine in state.engines if engine.capacity),
            blocks=sum(engine.blocks for engine in inspected),
            blocks_used=sum(engine.blocks_used for engine in inspected),
            waiting=sum(one.waiting for one in engines),
            running=sum(one.running for one in engines),
            parked=sum(one.parked for one in engines),
            tokens_per_s=tokens_per_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            window_s=window_s,
            mean_tokens_per_s=span.tokens_per_s,
            mean_prompt_tokens_per_s=span.prompt_tokens_per_s,
            ttft=span.spread("ttft"),
            gap=span.spread("gap"),
            step=span.spread("step"),
            stall=span.spread("stall"),
            reader_pace=self._reader_pace,
            residents=self._lanes.residents,
            is_whole=seen.charts < 0,
            tenures=tuple(self._lanes.since(seen.tenures)),
            drains=self._lanes.drains,
            adapters=tuple(row for id, row in rows.items() if seen.rows.get(id) is not row),
            gone=tuple(seen.rows.keys() - rows.keys()),
            unlisted=unlisted,
            requests=requests,
            unlisted_requests=len(self._open) - len(requests),
            notices=notices_of(state, self.shortages(), now),
            targets=target_rows(self.routes()),
            tenants=tenants,
            unlisted_tenants=unlisted_tenants,
            errors=self._trouble.errors(span),
            restarts=tuple(self._trouble.restarts),
            restarts_total=self._trouble.restarts_by.total(),
            charts=self._window.charts(window_s) if seen.charts != self._window.closed else None,
        )
        return frame, AlreadySent(self._lanes.ended, self._window.closed, rows)

    def _note_step(self, event: Produced) -> None:
        self._window.roll(event.at)
        window = self._window.open
        window.tokens += len(event.request_ids)
        window.shares[engine_sharer(event.engine_id)].tokens += len(event.request_ids)
        window.prompt_tokens += event.prompt_tokens
        if event.step_s:
            window.step[bucket_of(event.step_s)] += 1
        # This loop is the only code here that runs for every token, also without a reader. Most rows of a step got
        # their last token at the same time, so gaps are counted first and entered once.
        gaps: defaultdict[float, int] = defaultdict(int)
        tokens: defaultdict[tuple[AdapterId, str], int] = defaultdict(int)
        for request_id in event.request_ids:
            request = self._open.find(request_id)
            if request is None:
                continue  # dropped, because too many were open
            tokens[request.sharers] += 1
            if request.tokens:
                gaps[request.last_at] += 1
                request.stalled_s = max(request.stalled_s, event.at - request.read_until)
            else:
                bucket = bucket_of(event.at - request.last_at)
                window.ttft[bucket] += 1
                for sharer in request.sharers:
                    window.shares[sharer].ttft[bucket] += 1
            request.tokens += 1
            request.last_at = event.at
            request.read_until = max(event.at, request.read_until) + self._read_s
        for last_at, count in gaps.items():
            window.gap[bucket_of(event.at - last_at)] += count
        for sharers, count in tokens.items():
            for sharer in sharers:
                window.shares[sharer].tokens += count

    def _end(self, event: Finished) -> None:
        if request := self._open.end(event.request_id):
            self._hold()
            is_answered = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if is_answered and request.tokens and self._reader_pace:
                self._window.open.stall[bucket_of(request.stalled_s)] += 1

    def _note_engine(self, event: EngineRestarted | PauseChanged) -> None:
        self._trouble.hear(event)
        if isinstance(event, EngineRestarted):
            self._clear(event.engine_id, event.at)

    def _hold(self) -> None:
        self._window.hold(self._open.waiting, len(self._open) - self._open.waiting)

    def _clear(self, engine: EngineId, at: float) -> None:
        """An engine is gone, with its slots and its memory."""
        self._lanes.clear(at, engine)
        self._whereabouts.clear(engine)
        self._inspected.pop(engine, None)

    def _reasons(self, ready: Ready) -> dict[AdapterId, str]:
        """Why requests of an adapter wait, by the engine where one has waited longest."""
        standings = [(one, engine.engine_id) for engine in self._inspected.values() for one in engine.adapters]
        standings.sort(key=lambda one: -math.inf if one[0].oldest_at is None else -one[0].oldest_at)
        # Slots have changed since the engine answered: what is in one is no longer on its way there.
        return {
            one.adapter_id: (one.outlook if (engine, one.adapter_id) not in ready else "") or one.reason
            for one, engine in standings
        }

    def _rows_of(self, window_s: int) -> tuple[dict[AdapterId, AdapterRow], int]:
        """One row per adapter, by id, and how many have none: adapters in slots or with requests go first.

        Rows are made once a moment for all readers. A row that has not changed is the same object as before.
        """
        others = self._registry.others
        loaded = {one.adapter_id: one for one in (self._registry.base, *self._registry.adapters, *others)}
        # An adapter that was just unloaded may still have requests or a slot.
        counts, seated = self._moment.counts, {tenure.adapter for tenure in self._lanes.residents}
        busy = {BASE, *seated, *(AdapterId(one) for one in counts if isinstance(one, int))}
        if window_s not in self._moment.rows:
            # Of thousands that are idle, only the first are looked at.
            ids = sorted(
                busy | {*islice(loaded, MOST_ROWS)}, key=lambda id: (id != BASE, id not in seated, id not in counts, id)
            )
            former, before = {one.adapter_id for one in others}, self._rows.get(window_s, {})
            made = (self._row(id, loaded.get(id), window_s, id in former) for id in sorted(ids[:MOST_ROWS]))
            rows = {row.id: old if (old := before.get(row.id)) == row else row for row in made}
            self._moment.rows[window_s] = self._rows[window_s] = rows
        rows = self._moment.rows[window_s]
        return rows, len(loaded.keys() | busy) - len(rows)

    def _row(self, id: AdapterId, adapter: Adapter | None, window_s: int, is_former: bool) -> AdapterRow:
        figures = self._window.spans[window_s].figures_of(id)
        counts = self._moment.counts.get(id, Counter[Whereabouts]())
        oldest_at = self._open.oldest_at(id)
        return AdapterRow(
            id=id,
            name=adapter.name if adapter else f"adapter {id}",
            path=adapter.path if adapter else "",
            is_loaded=adapter is not None,
            version=adapter.version if adapter else 1,
            is_current=not is_former,
            place=self._whereabouts.of(adapter) if adapter else "",
            rank=self._whereabouts.ranks.get(id, 0),
            loads=figures.loads,
            waiting=counts[Whereabouts.WAITING],
            running=counts[Whereabouts.RUNNING],
            parked=counts[Whereabouts.PARKED],
            oldest_at=oldest_at,
            reason=self._why(id) if oldest_at is not None or counts[Whereabouts.PARKED] else "",
            ttft=figures.ttft,
            tokens_per_s=figures.tokens_per_s,
        )

    def _why(self, adapter: AdapterId) -> str:
        if self._inspected:
            return self._moment.reasons.get(adapter, "")
        state = self._moment.state
        return state.reason or f"the engine is {state.phase.value}"

    def _request_rows(self) -> tuple[RequestRow, ...]:
        return tuple(
            RequestRow(
                id=id,
                name=name_in_id(id),
                adapter=one.sharers[0],
                tenant=one.sharers[1],
                engine=one.engine,
                state=state,
                asked_at=one.asked_at,
                tokens=one.tokens,
                reason=self._why_not(one, state),
            )
            for id, one, state in self._open.shown(self._moment.ready)
        )

    def _why_not(self, request: OpenRequest, state: Whereabouts) -> str:
        """Why a request does not run: what its engine said of it, or what is known of its adapter."""
        said = request.explained
        if state is Whereabouts.RUNNING:
            return ""
        if not self._inspected or said is None or said.state is not state:
            return self._why(request.sharers[0])
        before = f"{said.position} of the same adapter before it" if said.position else ""
        return "; ".join(filter(None, [said.outlook or said.reason, before]))

    def _engine_frame(self, engine: ServiceState, span: Span) -> EngineFrame:
        id, trouble = engine.engine_id, self._trouble
        counts, inspected = self._moment.counts.get(engine_sharer(id), Counter()), self._inspected.get(id)
        return EngineFrame(
            id=id,
            phase=engine.phase.value,
            slots=self._slots.get(id, 0),
            reason=engine.reason,
            is_paused=id in trouble.paused,
            waiting=counts[Whereabouts.WAITING],
            running=counts[Whereabouts.RUNNING],
            parked=counts[Whereabouts.PARKED],
            blocks=inspected.blocks if inspected else 0,
            blocks_used=inspected.blocks_used if inspected else 0,
            tokens_per_s=span.figures_of(engine_sharer(id)).tokens_per_s,
            restarts=trouble.restarts_by[id],
        )
