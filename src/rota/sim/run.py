"""A simulation runs one scenario, with one seed and one set of policies, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from rota.core.adapter import BASE_LABEL, Adapter
from rota.core.config import Capacity, LoraConfig, SchedulerConfig
from rota.core.events import AdapterAdded, Event, Finished
from rota.core.ids import BASE, AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Message, RemoveAdapter, Submit
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.core.tenant import SOLE_TENANT, Tenant
from rota.observe.observer import Observer
from rota.observe.summary import Recorder
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim.cost import CostModel, LinearCost
from rota.sim.prompts import Prompts
from rota.sim.world import VirtualWorld
from rota.workload.arrivals import Ask, asks
from rota.workload.scenario import Scenario
from rota.workload.transient import Visit, visits

BLOCK_SIZE = 16
SHORTEST_CONTEXT = 8192  # of a server whose scenario does not say it
# Adapters are loaded before the first request comes; the first comes later if that takes longer.
STARTS_AT = 1.0


def scheduler_config(scenario: Scenario) -> SchedulerConfig:
    """What a scenario says about the server. Where no prompts begin alike, prefix caching would only cost time."""
    return SchedulerConfig(
        max_running_requests=scenario.max_running_requests, enable_prefix_caching=scenario.has_shared_prefixes
    )


def lora_config(scenario: Scenario, slots: int | None = None) -> LoraConfig:
    """What a scenario says about adapters: the slots, unless given, and host memory; left out, the server's default."""
    slots = scenario.slots if slots is None else slots
    # An adapter on the device is also kept in host memory, so host memory holds at least that many.
    copies = max(scenario.max_loaded_loras or LoraConfig().max_loaded_loras, slots)
    return LoraConfig(max_loras_per_batch=slots or "auto", max_loaded_loras=copies)


def adapter_name(adapter_id: AdapterId) -> str:
    return BASE_LABEL if adapter_id == BASE else f"adapter{adapter_id}"


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Runs once; `recorder` has the results, and `observers` are told of events as they happen."""

    scenario: Scenario
    costs: CostModel
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    seed: int = 0
    slots: int | None = None
    config: SchedulerConfig | None = None
    lora: LoraConfig | None = None
    observers: Sequence[Observer] = ()
    recorder: Recorder = field(default_factory=Recorder)
    starts_at: float = field(init=False)
    _world: VirtualWorld = field(init=False)
    _prompts: Prompts = field(init=False)
    _waves: list[Iterator[Ask]] = field(default_factory=list)  # what closed-loop clients ask next
    _client_of: dict[RequestId, int] = field(default_factory=dict)  # by open request
    _coming: dict[AdapterId, Visit] = field(default_factory=dict)  # transient adapters that are being read

    def run(self) -> Recorder:
        scenario = self.scenario
        config = self.config or scheduler_config(scenario)
        slots = scenario.slots if self.slots is None else self.slots
        lora = self.lora or lora_config(scenario, slots)
        scheduler = Scheduler(config, self._capacity(config, slots), self.policy, lora)
        fetch_s = self.costs.fetch_s if scenario.fetch_s is None else scenario.fetch_s
        rounds = math.ceil(scenario.adapters / lora.max_loaded_loras)  # of reads, when adapters are added
        self.starts_at = max(STARTS_AT, (rounds + 1) * fetch_s)
        self._prompts = Prompts(scenario.longest, len(scenario.clients) + 1)
        self._world = VirtualWorld(self._adapters(), self.costs, fetch_s=fetch_s)
        for number, client in enumerate(scenario.clients):
            wave = asks(client, seed=self.seed * 1000 + number)
            self._waves.append(wave)
            if client.concurrency is None:
                self._world.follow(self._arrivals(number, wave))
            else:
                for _ in range(client.concurrency):
                    self._ask_next(number, self.starts_at)
        self._schedule_transients()
        run(scheduler, self._world, self._emit, config.overlap_depth)
        self.recorder.settle()
        return self.recorder

    def _capacity(self, config: SchedulerConfig, slots: int) -> Capacity:
        scenario = self.scenario
        return Capacity(
            blocks=scenario.kv_blocks,
            block_size=BLOCK_SIZE,
            rows=config.max_running_requests,
            max_sequence_tokens=scenario.context_length or max(SHORTEST_CONTEXT, scenario.longest),
            slots=slots,
            deep_prefix=_deep_prefix(self.costs),
        )

    def _adapters(self) -> list[tuple[float, Message]]:
        numbers = map(AdapterId, range(1, self.scenario.adapters + 1))
        return [(0.0, AddAdapter(self._adapter(number), 0.0)) for number in numbers]

    def _adapter(self, number: AdapterId) -> Adapter:
        weight = self.scenario.weight_of(number)
        return Adapter(adapter_id=number, name=adapter_name(number), path="", weight=weight)

    def _schedule_transients(self) -> None:
        for visit in visits(self.scenario, self.seed):
            transient = AdapterId(self.scenario.adapters + 1 + visit.number)
            self._coming[transient] = visit
            self.recorder.transients.add(transient)
            at = self.starts_at + visit.at
            self._world.post(at, AddAdapter(self._adapter(transient), at))

    def _receive(self, transient: AdapterId, at: float) -> None:
        """A transient adapter was read: it gets its requests, and is removed whether these have ended or not."""
        visit = self._coming.pop(transient)
        for ask in visit.asks:
            message = self._submit("transient", replace(ask, adapter_id=transient), at + ask.at)
            self._world.post(message.request.arrived_at, message)
        self._world.post(at + visit.stays_s, RemoveAdapter(transient, at + visit.stays_s))

    def _arrivals(self, client: int, wave: Iterator[Ask]) -> Iterator[tuple[float, Message]]:
        for ask in wave:
            message = self._submit(client, ask, self.starts_at + ask.at)
            yield message.request.arrived_at, message

    def _ask_next(self, client: int, at: float) -> None:
        ask = next(self._waves[client], None)
        if ask is not None:
            message = self._submit(client, ask, at)
            self._client_of[message.request.request_id] = client
            self._world.post(message.request.arrived_at, message)

    def _submit(self, client: int | str, ask: Ask, at: float) -> Submit:
        """A request that a client sends at `at`, and its abort if the client will not wait for the end."""
        request_id = RequestId(f"{client}-{ask.number:07d}")
        tenant = self._tenant_of(client, ask)
        for observer in (self.recorder, *self.observers):
            observer.asked(request_id, ask.adapter_id, at)
        if tenant.name:
            self.recorder.note_tenant(request_id, tenant.name)
        if ask.leaves_after_s is not None:
            leaves_at = at + self.costs.front_s + ask.leaves_after_s
            self._world.post(leaves_at, Abort(request_id, leaves_at))
        number = client if isinstance(client, int) else len(self.scenario.clients)
        return Submit(
            Request(
                request_id=request_id,
                prompt=self._prompts.prompt(number, ask),
                sampling=_sampling(ask),
                arrived_at=at + self.costs.front_s,
                adapter_id=ask.adapter_id,
                tenant=tenant,
                priority=tenant.priority + ask.priority,
            )
        )

    def _tenant_of(self, client: int | str, ask: Ask) -> Tenant:
        if isinstance(client, str):
            return SOLE_TENANT
        return self.scenario.tenant_of(self.scenario.clients[client], adapter_name(ask.adapter_id))

    def _emit(self, events: list[Event]) -> None:
        for observer in (self.recorder, *self.observers):
            observer.observe(events)
        for event in events:
            if isinstance(event, Finished) and (client := self._client_of.pop(event.request_id, None)) is not None:
                self._ask_next(client, event.at)
            elif isinstance(event, AdapterAdded) and event.adapter_id in self._coming:
                self._receive(event.adapter_id, event.at)


def _deep_prefix(costs: CostModel) -> int | None:
    if isinstance(costs, LinearCost) and costs.prefix_pair_s:
        return round(costs.long_prompt_token_s / costs.prefix_pair_s)
    return None


def _sampling(ask: Ask) -> SamplingParams:
    """An answer ends at its limit, or by a stop token: the n-th token of such an answer is n."""
    if ask.max_tokens is None:
        return _params(ask.output_tokens, frozenset())
    return _params(ask.max_tokens, frozenset((ask.output_tokens,)))


@cache  # lengths repeat, and their check would take as long as all else that makes a request
def _params(limit: int, stop_token_ids: frozenset[int]) -> SamplingParams:
    return SamplingParams(max_new_tokens=limit, temperature=0.0, stop_token_ids=stop_token_ids)
