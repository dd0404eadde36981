"""The desk gives every message to the replicas that it is for, and makes one answer of theirs.

A request is at one replica, or held back by a quota until its tenant may run one more. Queries about the whole
service go to every replica that serves; each of them answers with an event of its own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    AdapterStanding,
    Admitted,
    Event,
    Explained,
    Finished,
    FinishReason,
    HostChanged,
    Inspected,
    Preempted,
    Routed,
    Whereabouts,
)
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.core.messages import (
    Abort,
    AbortAll,
    AddAdapter,
    Explain,
    Message,
    Pause,
    RemoveAdapter,
    Resume,
    ServedElsewhere,
)
from rota.core.request import Request
from rota.policy.routing import RoutingChoice
from rota.runtime.replicas.adapters import ReplicaAdapters
from rota.runtime.replicas.roster import LIVING, Roster
from rota.runtime.replicas.router import Router
from rota.runtime.replicas.tenant_quotas import TenantQuotas
from rota.runtime.service import Service, ServicePhase, ServiceState, refuse
from rota.scheduler.sequence import Reason

# ── held requests ───────────────────────────────────────────────────────────────────────────────────────────────────
# A request that a quota holds back is answered for here, as a scheduler answers for its waiting requests.


def end_of(request: Request, reason: FinishReason, at: float, fault: Fault | None = None) -> Finished:
    """The end of a request that no replica has."""
    return Finished(request_id=request.request_id, at=at, reason=reason, prompt_tokens=len(request.prompt), fault=fault)


def explain_held(quotas: TenantQuotas, request_id: RequestId, at: float) -> Explained:
    """Why a request waits; of a request that is not held, that it is not known."""
    request = quotas.find(request_id)
    if request is None:
        return Explained(request_id=request_id, at=at, state=Whereabouts.UNKNOWN)
    return Explained(
        request_id=request_id,
        at=at,
        state=Whereabouts.WAITING,
        reason=Reason.TENANT_FULL.value,
        since=request.arrived_at,
        position=quotas.position(request),
    )


def with_held(inspected: Inspected, held: Iterable[Request]) -> Inspected:
    """One replica's answer with the requests that wait for any replica, so that they are counted once."""
    by_adapter: defaultdict[AdapterId, list[Request]] = defaultdict(list)
    for request in held:
        by_adapter[request.adapter_id].append(request)
    if not by_adapter:
        return inspected
    standings = [_with(one, by_adapter.pop(one.adapter_id, [])) for one in inspected.adapters]
    standings += [_with(_nobody(adapter_id), requests) for adapter_id, requests in by_adapter.items()]
    return replace(inspected, adapters=tuple(standings))


def _with(standing: AdapterStanding, held: list[Request]) -> AdapterStanding:
    if not held:
        return standing
    first_at = min(request.arrived_at for request in held)
    if standing.oldest_at is not None and standing.oldest_at <= first_at:
        return replace(standing, waiting=standing.waiting + len(held))
    return replace(standing, waiting=standing.waiting + len(held), oldest_at=first_at, reason=Reason.TENANT_FULL.value)


def _nobody(adapter_id: AdapterId) -> AdapterStanding:
    return AdapterStanding(adapter_id=adapter_id, waiting=0, running=0, parked=0, oldest_at=None, reason="")


LOG = logging.getLogger("rota.engine")


class ReplicaDesk:
    """Callers hold a lock: events of a replica and messages of clients come from many threads."""

    def __init__(self, roster: Roster, router: Router, now: Callable[[], float] = time.monotonic) -> None:
        self._roster = roster
        self._router = router
        self._now = now
        self._at: dict[RequestId, int] = {}  # the replica of each open request that is not held
        self._ended: set[RequestId] = set()  # have ended here, and their replicas will tell of that once more
        self._up = frozenset(range(len(roster)))  # where the router may send requests
        self._seen: list[ServiceState | None] = [None] * len(roster)
        self._quotas = TenantQuotas()
        self._adapters = ReplicaAdapters(roster.tell)
        self._routes: list[Event] = []  # told with the next events of any replica
        self._removals: dict[AdapterId, RemoveAdapter] = {}  # wait until no request for the adapter is held
        self._is_paused = False
        self._is_closed = False

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> list[Event]:
        """Pass a message on. Gives the events that answer it without a replica. Raises RequestError if all are down."""
        if (state := self._roster.look()).phase is ServicePhase.DOWN:
            raise refuse(state.reason)
        match message:
            case Request():
                return self._submit(message)
            case Abort(request_id, at, is_complete):
                reason = FinishReason.STOP if is_complete else FinishReason.ABORT
                return [] if self._pass_on(request_id, message) else self._end_held(request_id, reason, at)
            case Explain(request_id, at):
                return [] if self._pass_on(request_id, message) else [explain_held(self._quotas, request_id, at)]
            case AddAdapter():
                events = self._look_who_is_away()
                if not self._adapters.add(message, self._roster.numbers()):
                    raise refuse(self._roster.why_none())
                return events
            case RemoveAdapter():
                return [*self._look_who_is_away(), *self._remove(message)]
            case AbortAll():
                self._roster.tell_all(LIVING, message)
                return self._end_all_held(FinishReason.ABORT)
            case Pause() | Resume():
                self._is_paused = isinstance(message, Pause)
                self._roster.tell_all(LIVING, message)
                return []
            case _:
                self._roster.tell_all((ServicePhase.READY,), message)
                return []

    def add(self, replica: Service) -> int:
        """A replica joins, and is told of all adapters and of a pause; it takes requests once it is ready."""
        number = self._roster.add(replica)
        self._router.add()
        self._seen.append(None)
        self._adapters.away |= {number}
        self._adapters.introduce(number, self._now())
        if self._is_paused:
            self._roster.tell(number, Pause(self._now()))
        return number

    def close(self) -> list[Event]:
        """The service stops: what is held ends here, and nothing is sent any more when a place becomes free."""
        self._is_closed = True
        return self._end_all_held(FinishReason.ABORT)

    def _submit(self, request: Request) -> list[Event]:
        if (replica := self._at.get(request.request_id)) is not None:
            self._roster.tell(replica, request)  # an id that is open: the replica that has it refuses it
            return []
        if fault := self._adapters.fault_of(request.adapter_id) or self._quotas.fault_of(request):
            return [end_of(request, FinishReason.FAILED, self._now(), fault)]
        if not self._quotas.hold(request):
            self._dispatch(request)
        return []

    def _dispatch(self, request: Request) -> None:
        """Send a request to the replica that the router chooses. Raises RequestError if all are down."""
        for _ in range(len(self._roster)):
            choice = self._choose(request)
            if self._roster.tell(choice.replica, request):
                self._at[request.request_id] = choice.replica
                self._quotas.send(request, choice.replica)
                reason, number = choice.reason.name.lower(), EngineId(choice.replica)
                at = self._now()
                self._routes.append(Routed(request_id=request.request_id, at=at, reason=reason, engine_id=number))
                return
            self._roster.look()  # the replica went down between the last look and the message
        raise refuse(self._roster.why_none())

    def _choose(self, request: Request) -> RoutingChoice:
        self._look()
        if not self._up:
            raise refuse(self._roster.why_none())
        lacking = self._adapters.lacking(request.adapter_id, self._up)
        if len(lacking) < len(self._up):
            return self._router.route(request, self._now(), lacking)
        # None that is up could read the adapter. One that starts may; else any of them refuses it with the reason.
        starting = self._roster.starting()
        having = {*starting} - {*self._adapters.lacking(request.adapter_id, starting)}
        open_at = Counter(self._at.values())
        return self._router.book(min(having or self._up, key=lambda one: (open_at[one], one)), request)

    def _look(self) -> None:
        """Tell the router which replicas take requests."""
        up = self._roster.takers
        if up is self._up:
            return
        for replica in self._up - up:
            self._router.note_down(replica)
        for replica in up - self._up:
            self._router.note_up(replica)
        self._up = up

    def _remove(self, message: RemoveAdapter) -> list[Event]:
        """Take an adapter from all replicas, behind the requests for it that are held here."""
        if self._quotas.holds_adapter(message.adapter_id):
            self._removals[message.adapter_id] = message
            return []
        return self._adapters.remove(message, self._roster.numbers())

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, replica: int, events: list[Event]) -> list[Event]:
        """What a client hears when a replica tells this."""
        self._router.note_events(replica, events)
        told, self._routes = self._routes, []
        for event in events:  # nearly always a step's tokens
            match event:
                case Finished(request_id=request_id) if request_id in self._ended:
                    self._ended.discard(request_id)
                case Finished():
                    told.append(event)
                    told += self._finished(replica, event)
                case Admitted(request_id=request_id) | Preempted(request_id=request_id):
                    self._quotas.seat(request_id, isinstance(event, Admitted))
                    told.append(event)
                case AdapterAdded() | AdapterRefused() | AdapterRemoved():
                    told += self._adapters.note(replica, event)
                case HostChanged():
                    self._adapters.seal(replica, event)
                    told.append(event)
                case Inspected() if replica == self._roster.lowest:
                    told.append(with_held(event, self._quotas.held))
                case _:
                    told.append(event)
        if (state := self._roster[replica].state) is not self._seen[replica]:
            self._seen[replica] = state
            told += self._changed(replica, state)
        return told

    def _changed(self, replica: int, state: ServiceState) -> list[Event]:
        """A replica's phase is another, or what it waits for is."""
        told = self._look_who_is_away()
        if state.may_last:
            told += self._end_all_at(replica, Fault(FaultCode.ENGINE_DIED, state.reason))
        if state.phase is ServicePhase.DOWN:
            told += self._gone(replica, state.reason)
        return told

    def _look_who_is_away(self) -> list[Event]:
        away, before = self._roster.away(), self._adapters.away
        self._adapters.away = away
        reasons = {replica: self._roster[replica].state.reason for replica in sorted(away - before)}
        return [event for replica, reason in reasons.items() for event in self._adapters.note_away(replica, reason)]

    def _finished(self, replica: int, event: Finished) -> list[Event]:
        """A request's place is free for the next one of its tenant."""
        self._at.pop(event.request_id, None)
        if not event.fault:
            tenant, others = self._quotas.others_of(event.request_id, replica)
            served = ServedElsewhere(tenant, event.prompt_tokens - event.cached_tokens, event.output_tokens)
            for other in others:
                self._roster.tell(other, served)
        return self._free(event.request_id)

    def _free(self, request_id: RequestId) -> list[Event]:
        events: list[Event] = []
        due = self._quotas.end(request_id)
        if due:
            self._roster.look()  # the events may be those of a death
        while due:
            request = due.pop(0)
            try:
                self._dispatch(request)
            except RequestError as error:
                events.append(end_of(request, FinishReason.FAILED, self._now(), error.fault))
                due += self._quotas.end(request.request_id)
        return events + self._overdue_removals()

    def _overdue_removals(self) -> list[Event]:
        overdue = [one for one in self._removals.values() if not self._quotas.holds_adapter(one.adapter_id)]
        for message in overdue:
            del self._removals[message.adapter_id]
        return [event for message in overdue for event in self._adapters.remove(message, self._roster.numbers())]

    def _gone(self, replica: int, reason: str) -> list[Event]:
        """A replica stays down. What it owed is answered already; the last one takes with it what is held."""
        if self._is_closed:
            return []
        if self._roster.is_late(replica):
            fields = {"engine": replica, "why": reason}
            LOG.error("A replica that joined cannot start.", extra={"fields": fields})
        if self._roster.numbers():
            return self._adapters.note_down(replica, reason)
        return self._end_all_held(FinishReason.FAILED, Fault(FaultCode.ENGINE_DIED, reason))

    # ── what is held ─────────────────────────────────────────────────────────────────────────────────────────────

    def _end_held(self, request_id: RequestId, reason: FinishReason, at: float) -> list[Event]:
        request = self._quotas.find(request_id)
        return [end_of(request, reason, at), *self._free(request_id)] if request else []

    def _end_all_held(self, reason: FinishReason, fault: Fault | None = None) -> list[Event]:
        held = list(self._quotas.held)
        for request in held:
            self._quotas.end(request.request_id)
        return [*(end_of(request, reason, self._now(), fault) for request in held), *self._overdue_removals()]

    def _end_all_at(self, replica: int, fault: Fault) -> list[Event]:
        """End the requests that wait for a replica's start. The replica ends them too, if it ever starts."""
        waiting = [request_id for request_id, at in self._at.items() if at == replica]
        now, events = self._now(), list[Event]()
        for request_id in waiting:
            del self._at[request_id]
            if self._roster.tell(replica, Abort(request_id, now)):
                self._ended.add(request_id)
            events.append(Finished(request_id=request_id, at=now, reason=FinishReason.FAILED, fault=fault))
            events += self._free(request_id)
        return events

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _pass_on(self, request_id: RequestId, message: Message) -> bool:
        """Send a message to the replica of a request; False if no replica has it."""
        replica = self._at.get(request_id)
        return replica is not None and self._roster.tell(replica, message)
