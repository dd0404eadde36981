"""A simulation runs one scenario, with one seed and one set of policies, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from rota.sim.cost import CostModel
from rota.sim.world import VirtualWorld
from rota.workload.arrivals import Ask, asks
from rota.workload.scenario import Scenario
from rota.workload.transient import Visit, visits

BLOCK_SIZE = 16
LONGEST_SEQUENCE = 8192
# Adapters are loaded before the first request comes.
STARTS_AT = 1.0
# Prompts share their numbers, so that a day of traffic fits into memory.
NUMBERS = tuple(range(LONGEST_SEQUENCE))


def scheduler_config(scenario: Scenario) -> SchedulerConfig:
    """What a scenario says about the server. Prompts never begin alike here, so prefix caching would only cost time."""
    return SchedulerConfig(max_running_requests=scenario.max_running_requests, enable_prefix_caching=False)


def lora_config(scenario: Scenario, slots: int | None = None) -> LoraConfig:
    """What a scenario says about adapters: the slots, unless given, and host memory for all its adapters."""
    slots = scenario.slots if slots is None else slots
    return LoraConfig(max_loras_per_batch=slots or "auto", max_loaded_loras=max(128, scenario.adapters, slots))


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
    _world: VirtualWorld = field(init=False)
    _waves: list[Iterator[Ask]] = field(default_factory=list)  # what closed-loop clients ask next
    _client_of: dict[RequestId, int] = field(default_factory=dict)  # by open request
    _coming: dict[AdapterId, Visit] = field(default_factory=dict)  # transient adapters that are being read

    def run(self) -> Recorder:
        scenario = self.scenario
        config = self.config or scheduler_config(scenario)
        slots = scenario.slots if self.slots is None else self.slots
        capacity = Capacity(
            blocks=scenario.kv_blocks,
            block_size=BLOCK_SIZE,
            rows=config.max_running_requests,
            max_sequence_tokens=LONGEST_SEQUENCE,
            slots=slots,
        )
        lora = self.lora or lora_config(scenario, slots)
        scheduler = Scheduler(config, capacity, self.policy, lora)
        self._world = VirtualWorld(self._adapters(), self.costs)
        for number, client in enumerate(scenario.clients):
            wave = asks(client, seed=self.seed * 1000 + number)
            self._waves.append(wave)
            if client.concurrency is None:
                self._world.follow(self._arrivals(number, wave))
            else:
                for _ in range(client.concurrency):
                    self._ask_next(number, STARTS_AT)
        self._schedule_transients()
        run(scheduler, self._world, self._emit, config.overlap_depth)
        return self.recorder

    def _adapters(self) -> list[tuple[float, Message]]:
        numbers = map(AdapterId, range(1, self.scenario.adapters + 1))
        return [
            (0.0, AddAdapter(Adapter(adapter_id=number, name=adapter_name(number), path=""), 0.0)) for number in numbers
        ]

    def _schedule_transients(self) -> None:
        for visit in visits(self.scenario, self.seed):
            transient = AdapterId(self.scenario.adapters + 1 + visit.ask.number)
            self._coming[transient] = visit
            self.recorder.transients.add(transient)
            at = STARTS_AT + visit.ask.at
            self._world.post(at, AddAdapter(Adapter(adapter_id=transient, name=adapter_name(transient), path=""), at))

    def _receive(self, transient: AdapterId, at: float) -> None:
        """A transient adapter was read: it gets one request, and is removed whether that has ended or not."""
        visit = self._coming.pop(transient)
        self._world.post(at, self._submit("transient", replace(visit.ask, adapter_id=transient), at))
        self._world.post(at + visit.stays_s, RemoveAdapter(transient, at + visit.stays_s))

    def _arrivals(self, client: int, wave: Iterator[Ask]) -> Iterator[tuple[float, Message]]:
        for ask in wave:
            at = STARTS_AT + ask.at
            yield at, self._submit(client, ask, at)

    def _ask_next(self, client: int, at: float) -> None:
        ask = next(self._waves[client], None)
        if ask is not None:
            message = self._submit(client, ask, at)
            self._client_of[message.request.request_id] = client
            self._world.post(at, message)

    def _submit(self, client: int | str, ask: Ask, at: float) -> Submit:
        """A request, and its abort if the client will not wait for the end."""
        request_id = RequestId(f"{client}-{ask.number:07d}")
        tenant = self._tenant_of(client, ask)
        sampling = SamplingParams(max_new_tokens=ask.output_tokens, temperature=0.0)
        for observer in (self.recorder, *self.observers):
            observer.asked(request_id, ask.adapter_id, at)
        if tenant.name:
            self.recorder.note_tenant(request_id, tenant.name)
        if ask.leaves_after_s is not None:
            leaves_at = at + ask.leaves_after_s
            self._world.post(leaves_at, Abort(request_id, leaves_at))
        # The first token is the request's own, so no two prompts begin alike.
        prompt = (LONGEST_SEQUENCE + ask.number, *NUMBERS[1 : ask.prompt_tokens])
        return Submit(
            Request(
                request_id=request_id,
                prompt=prompt,
                sampling=sampling,
                arrived_at=at,
                adapter_id=ask.adapter_id,
                tenant=tenant,
                priority=tenant.priority,
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
