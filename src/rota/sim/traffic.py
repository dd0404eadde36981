"""Traffic is what a scenario's clients send: requests at a rate or in a closed loop, aborts, and passing adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from rota.core.adapter import BASE_LABEL, Adapter
from rota.core.events import AdapterAdded, Event, Finished
from rota.core.grammar import Grammar
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Message, RemoveAdapter
from rota.core.request import Request, SamplingParams
from rota.core.tenant import SOLE_TENANT, Tenant
from rota.observe.observer import Observer
from rota.observe.summary import Recorder
from rota.sim.world import Mail
from rota.workload.arrivals import Arrival, Visit, asks, visits
from rota.workload.scenario import Scenario

GRAMMAR = Grammar("simulated")  # its cost does not depend on what it says


def adapter_name(adapter_id: AdapterId) -> str:
    return BASE_LABEL if adapter_id == BASE else f"adapter{adapter_id}"


class SimulatedTraffic:
    """Posts messages as their time comes; must be told of events, because some clients ask again when answered."""

    def __init__(self, scenario: Scenario, seed: int, mail: Mail, recorder: Recorder, replicas: int = 1) -> None:
        self._scenario = scenario
        self._seed = seed
        self._mail = mail
        self._recorder = recorder
        self._replicas = replicas
        self._observers: Sequence[Observer] = ()
        self._front_s = self._starts_at = 0.0
        self._numbers = tuple(
            range(scenario.longest)
        )  # shared by all prompts, so that a day of traffic fits into memory
        self._waves: list[Iterator[Arrival]] = []  # what closed-loop clients ask next
        self._client_of: dict[RequestId, int] = {}  # by open request
        self._coming: dict[AdapterId, Visit] = {}  # transient adapters that are being read
        self._added: dict[AdapterId, int] = {}  # by how many replicas, as long as some have not read it

    def begin(self, starts_at: float, front_s: float, observers: Sequence[Observer]) -> None:
        """Adapters are added at 0, and clients begin at `starts_at`; the front end adds `front_s` to each request."""
        self._starts_at, self._front_s, self._observers = starts_at, front_s, observers
        for number in range(1, self._scenario.adapters + 1):
            self._mail.post(0.0, AddAdapter(adapter=self._adapter(AdapterId(number)), at=0.0))
        for number, client in enumerate(self._scenario.clients):
            wave = asks(client, seed=self._seed * 1000 + number)
            self._waves.append(wave)
            if client.concurrency is None:
                self._mail.follow(self._arrivals(number, wave))
            else:
                for _ in range(client.concurrency):
                    self._ask_next(number, starts_at)
        self._schedule_transients()

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished) and (client := self._client_of.pop(event.request_id, None)) is not None:
                self._ask_next(client, event.at)
            elif isinstance(event, AdapterAdded) and event.adapter_id in self._coming:
                self._note_added(event.adapter_id, event.at)

    def _adapter(self, number: AdapterId) -> Adapter:
        weight = self._scenario.weight_of(number)
        return Adapter(adapter_id=number, name=adapter_name(number), path="", weight=weight)

    def _schedule_transients(self) -> None:
        for visit in visits(self._scenario, self._seed):
            transient = AdapterId(self._scenario.adapters + 1 + visit.number)
            self._coming[transient] = visit
            self._recorder.transients.add(transient)
            at = self._starts_at + visit.at
            self._mail.post(at, AddAdapter(adapter=self._adapter(transient), at=at))

    def _note_added(self, transient: AdapterId, at: float) -> None:
        """Once all replicas have read a transient adapter, it gets its requests.

        It is removed whether these have ended or not.
        """
        self._added[transient] = self._added.get(transient, 0) + 1
        if self._added[transient] < self._replicas:
            return
        del self._added[transient]
        visit = self._coming.pop(transient)
        for ask in visit.asks:
            message = self._submit("transient", replace(ask, adapter_id=transient), at + ask.at)
            self._mail.post(message.arrived_at, message)
        self._mail.post(at + visit.stays_s, RemoveAdapter(adapter_id=transient, at=at + visit.stays_s))

    def _arrivals(self, client: int, wave: Iterator[Arrival]) -> Iterator[tuple[float, Message]]:
        for ask in wave:
            message = self._submit(client, ask, self._starts_at + ask.at)
            yield message.arrived_at, message

    def _ask_next(self, client: int, at: float) -> None:
        ask = next(self._waves[client], None)
        if ask is not None:
            message = self._submit(client, ask, at)
            self._client_of[message.request_id] = client
            self._mail.post(message.arrived_at, message)

    def _submit(self, client: int | str, ask: Arrival, at: float) -> Request:
        """A request that a client sends at `at`, and its abort if the client will not wait for the end."""
        request_id = RequestId(f"{client}-{ask.number:07d}")
        tenant = self._tenant_of(client, ask)
        for observer in (self._recorder, *self._observers):
            observer.asked(request_id, ask.adapter_id, at, tenant.name)
        if tenant.name:
            self._recorder.note_tenant(request_id, tenant.name)
        if ask.leaves_after_s is not None:
            leaves_at = at + self._front_s + ask.leaves_after_s
            self._mail.post(leaves_at, Abort(request_id, leaves_at))
        number = client if isinstance(client, int) else len(self._scenario.clients)
        return Request(
            request_id=request_id,
            prompt=self._prompt(number, ask),
            sampling=self._sampling(client, ask),
            arrived_at=at + self._front_s,
            adapter_id=ask.adapter_id,
            tenant=tenant,
            priority=tenant.priority + ask.priority,
        )

    def _prompt(self, client: int, ask: Arrival) -> tuple[int, ...]:
        """No two prompts are alike, except where a client's prompts share their first tokens.

        client 2, request 7    prefix of client 2 | the request's own number | 5 6 7 …
        """
        first_free, numbers = len(self._numbers), self._numbers
        own = first_free + (1 + ask.number) * (len(self._scenario.clients) + 1) + client
        if not ask.shared_tokens:
            return (own, *numbers[1 : ask.prompt_tokens])
        prefix = (first_free + client, *numbers[1 : ask.shared_tokens])
        rest = numbers[ask.shared_tokens + 1 : ask.prompt_tokens]
        return prefix if ask.prompt_tokens == ask.shared_tokens else (*prefix, own, *rest)

    def _sampling(self, client: int | str, ask: Arrival) -> SamplingParams:
        """Requests with a grammar are spread evenly over a client's."""
        sampling = _sampling(ask)
        share = self._scenario.clients[client].grammar_share if isinstance(client, int) else 0.0
        return (
            replace(sampling, grammar=GRAMMAR) if int((ask.number + 1) * share) > int(ask.number * share) else sampling
        )

    def _tenant_of(self, client: int | str, ask: Arrival) -> Tenant:
        if isinstance(client, str):
            return SOLE_TENANT
        return self._scenario.tenant_of(self._scenario.clients[client], adapter_name(ask.adapter_id))


def _sampling(ask: Arrival) -> SamplingParams:
    """An answer ends at its limit, or by a stop token: the n-th token of such an answer is n."""
    if ask.max_tokens is None:
        return _params(ask.output_tokens, frozenset())
    return _params(ask.max_tokens, frozenset((ask.output_tokens,)))


@cache  # lengths repeat, and their check would take as long as all else that makes a request
def _params(limit: int, stop_token_ids: frozenset[int]) -> SamplingParams:
    return SamplingParams(max_new_tokens=limit, temperature=0.0, stop_token_ids=stop_token_ids)
