"""The desk gives every message to the replicas that it is for, and makes one answer of theirs.

A request is at one replica, or held back by a quota until its tenant may run one more. Queries about the whole
service go to every replica that serves; each of them answers with an event of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from rota.core.errors import Fault, FaultCode, RequestError
from rota.core.events import (
    AdapterAdded,
    AdapterRefused,
    AdapterRemoved,
    Admitted,
    Event,
    Explained,
    Finished,
    FinishReason,
    Inspected,
    Preempted,
    Routed,
)
from rota.core.ids import AdapterId, EngineId, RequestId
from rota.core.messages import Abort, AbortAll, AddAdapter, Explain, Message, RemoveAdapter, ServedElsewhere, Submit
from rota.core.request import Request
from rota.runtime.replicas.adapters import ReplicaAdapters
from rota.runtime.replicas.held_requests import end_of, explain_held, with_held
from rota.runtime.replicas.tenant_quotas import TenantQuotas
from rota.runtime.routing.router import Router
from rota.runtime.service import Phase, Service, refuse

LIVING = (Phase.READY, Phase.STARTING)


class ReplicaDesk:
    """Callers hold a lock: events of a replica and messages of clients come from many threads."""

    def __init__(self, replicas: Sequence[Service], router: Router, now: Callable[[], float] = time.monotonic) -> None:
        self._replicas = replicas
        self._router = router
        self._now = now
        self._at: dict[RequestId, int] = {}  # the replica of each open request that is not held
        self._up = {*range(len(replicas))}  # where the router may send requests
        self._quotas = TenantQuotas()
        self._adapters = ReplicaAdapters(self._tell)
        self._routes: list[Event] = []  # told with the next events of any replica
        self._removals: dict[AdapterId, RemoveAdapter] = {}  # wait until no request for the adapter is held
        self._is_closed = False

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, message: Message) -> list[Event]:
        """Pass a message on. Gives the events that answer it without a replica. Raises RequestError if all are down."""
        match message:
            case Submit(request):
                return self._submit(request)
            case Abort(request_id, at, is_complete):
                reason = FinishReason.STOP if is_complete else FinishReason.ABORT
                return [] if self._pass_on(request_id, message) else self._end_held(request_id, reason, at)
            case Explain(request_id, at):
                return [] if self._pass_on(request_id, message) else [self._explain(request_id, at)]
            case AddAdapter():
                if not self._adapters.add(message, self._numbers(LIVING)):
                    raise refuse("All replicas are down.")
                return []
            case RemoveAdapter():
                return self._remove(message)
            case AbortAll():
                self._tell_all(LIVING, message)
                return self._end_all_held(FinishReason.ABORT)
            case _:
                self._tell_all((Phase.READY,), message)
                return []

    def close(self) -> list[Event]:
        """The service stops: what is held ends here, and nothing is sent any more when a place becomes free."""
        self._is_closed = True
        return self._end_all_held(FinishReason.ABORT)

    def _submit(self, request: Request) -> list[Event]:
        if (replica := self._at.get(request.request_id)) is not None:
            self._tell(replica, Submit(request))  # an id that is open already: the replica that has it refuses it
            return []
        if fault := self._quotas.fault_of(request):
            return [end_of(request, FinishReason.FAILED, self._now(), fault)]
        if not self._quotas.hold(request):
            self._dispatch(request)
        return []

    def _dispatch(self, request: Request) -> None:
        """Send a request to the replica that the router chooses. Raises RequestError if all are down."""
        for _ in self._replicas:
            replica = self._choose(request)
            if self._tell(replica, Submit(request)):
                self._at[request.request_id] = replica
                self._quotas.send(request, replica)
                self._note_route(request.request_id)
                return
            # The replica went down between the look and the message, and the next look sees that.
        raise refuse("All replicas are down.")

    def _note_route(self, request_id: RequestId) -> None:
        if choice := self._router.choice_of(request_id):
            reason, engine_id = choice.reason.name.lower(), EngineId(choice.replica)
            self._routes.append(Routed(request_id=request_id, at=self._now(), reason=reason, engine_id=engine_id))

    def _choose(self, request: Request) -> int:
        self._look()
        lacking = self._adapters.lacking(request.adapter_id, self._up)
        if not lacking:
            return self._router.route(request, self._now()).replica
        # Some replica could not read the adapter again. That is rare, and the router knows nothing of it.
        having = [one for one in self._numbers(LIVING) if one not in self._adapters.lacking(request.adapter_id, [one])]
        replica = min(having or self._up, key=lambda one: (one not in self._up, self._open_at(one), one))
        self._router.note_message(replica, Submit(request))
        return replica

    def _look(self) -> None:
        """Tell the router which replicas serve. While none does, requests wait for those that start."""
        up = {*self._numbers((Phase.READY,))} or {*self._numbers((Phase.STARTING,))}
        if up == self._up:
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
        return self._adapters.remove(message, self._numbers(LIVING))

    def _explain(self, request_id: RequestId, at: float) -> Explained:
        return explain_held(self._quotas, request_id, at)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, replica: int, events: list[Event]) -> list[Event]:
        """What a client hears when a replica tells this."""
        self._router.note_events(replica, events)
        told, self._routes = self._routes, []
        for event in events:  # nearly always a step's tokens
            match event:
                case Finished():
                    told.append(event)
                    told += self._finished(replica, event)
                case Admitted(request_id=request_id) | Preempted(request_id=request_id):
                    self._quotas.seat(request_id, isinstance(event, Admitted))
                    told.append(event)
                case AdapterAdded() | AdapterRefused() | AdapterRemoved():
                    told += self._adapters.note(replica, event)
                case Inspected() if replica == min(self._numbers((Phase.READY,)), default=replica):
                    told.append(with_held(event, self._quotas.held))
                case _:
                    told.append(event)
        if (state := self._replicas[replica].state).phase is Phase.DOWN:
            told += self._gone(replica, state.reason)
        return told

    def _finished(self, replica: int, event: Finished) -> list[Event]:
        """A request's place is free for the next one of its tenant."""
        self._at.pop(event.request_id, None)
        if not event.fault:
            tenant, others = self._quotas.others_of(event.request_id, replica)
            served = ServedElsewhere(tenant, event.prompt_tokens - event.cached_tokens, event.output_tokens)
            for other in others:
                self._tell(other, served)
        return self._free(event.request_id)

    def _free(self, request_id: RequestId) -> list[Event]:
        events: list[Event] = []
        due = self._quotas.end(request_id)
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
        return [event for message in overdue for event in self._adapters.remove(message, self._numbers(LIVING))]

    def _gone(self, replica: int, reason: str) -> list[Event]:
        """A replica stays down. What it owed is answered already; the last one takes with it what is held."""
        if self._is_closed:
            return []
        if self._numbers(LIVING):
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

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _numbers(self, phases: Iterable[Phase]) -> list[int]:
        return [number for number, replica in enumerate(self._replicas) if replica.state.phase in phases]

    def _open_at(self, replica: int) -> int:
        return sum(one == replica for one in self._at.values())

    def _pass_on(self, request_id: RequestId, message: Message) -> bool:
        """Send a message to the replica of a request; False if no replica has it."""
        replica = self._at.get(request_id)
        return replica is not None and self._tell(replica, message)

    def _tell(self, replica: int, message: Message) -> bool:
        """False if the replica is down."""
        try:
            self._replicas[replica].send(message)
        except RequestError:
            return False
        return True

    def _tell_all(self, phases: Iterable[Phase], message: Message) -> None:
        for number in self._numbers(phases):
            with suppress(RequestError):
                self._replicas[number].send(message)
