"""A simulation: one scenario, one seed, one set of policies, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rota.core.adapter import Adapter
from rota.core.config import Capacity, LoraConfig, SchedulerConfig
from rota.core.events import Event, Finished
from rota.core.ids import AdapterId, RequestId
from rota.core.messages import Abort, AddAdapter, Message, Submit
from rota.core.policy_config import PolicyConfig
from rota.core.request import Request, SamplingParams
from rota.observe.summary import Recorder
from rota.runtime.loop import run
from rota.scheduler import Scheduler
from rota.sim.cost import CostModel
from rota.sim.world import VirtualWorld
from rota.workload.arrivals import Ask, asks
from rota.workload.scenario import Scenario

BLOCK_SIZE = 16
LONGEST_SEQUENCE = 8192
# Adapters are known before the first request comes.
STARTS_AT = 1.0


@dataclass(slots=True)
class Simulation:
    """Runs once; `recorder` and `events` tell what happened."""

    scenario: Scenario
    costs: CostModel
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    seed: int = 0
    slots: int | None = None
    depth: int = 2
    scheduler_config: SchedulerConfig | None = None
    watch: Callable[[list[Event]], None] | None = None
    recorder: Recorder = field(default_factory=Recorder)
    _world: VirtualWorld = field(init=False)
    _waves: list[Iterator[Ask]] = field(default_factory=list)  # what closed-loop clients ask next
    _client_of: dict[RequestId, int] = field(default_factory=dict)

    def run(self) -> Recorder:
        scenario = self.scenario
        slots = scenario.slots if self.slots is None else self.slots
        capacity = Capacity(
            scenario.kv_blocks, BLOCK_SIZE, scenario.max_running_requests, LONGEST_SEQUENCE, slots
        )
        # Prompts here are numbers that never repeat; naming their blocks would only cost time.
        config = self.scheduler_config or SchedulerConfig(enable_prefix_caching=False)
        lora = LoraConfig(max_loaded_loras=max(128, scenario.adapters))
        scheduler = Scheduler(config, capacity, self.policy, lora)
        self._world = VirtualWorld(self._adapters(), self.costs)
        for number, client in enumerate(scenario.clients):
            wave = asks(client, seed=self.seed * 1000 + number)
            self._waves.append(wave)
            if client.concurrency is None:
                for ask in wave:
                    self._submit(number, ask, STARTS_AT + ask.at)
            else:
                for _ in range(client.concurrency):
                    self._submit_next(number, STARTS_AT)
        run(scheduler, self._world, self._emit, self.depth)
        return self.recorder

    def _adapters(self) -> list[tuple[float, Message]]:
        numbers = range(1, self.scenario.adapters + 1)
        return [(0.0, AddAdapter(Adapter(AdapterId(number), f"adapter{number}", ""), 0.0)) for number in numbers]

    def _submit_next(self, client: int, at: float) -> None:
        ask = next(self._waves[client], None)
        if ask is not None:
            self._submit(client, ask, at)

    def _submit(self, client: int, ask: Ask, at: float) -> None:
        request_id = RequestId(f"{client}-{ask.number:07d}")
        sampling = SamplingParams(max_new_tokens=ask.output_tokens, temperature=0.0)
        prompt = tuple(range(ask.prompt_tokens))
        self.recorder.asked(request_id, ask.adapter, at)
        self._client_of[request_id] = client
        self._world.post(at, Submit(Request(request_id, prompt, sampling, at, ask.adapter)))
        if ask.leaves_after_s is not None:
            leaves_at = at + ask.leaves_after_s
            self._world.post(leaves_at, Abort(request_id, leaves_at))

    def _emit(self, events: list[Event]) -> None:
        self.recorder.observe(events)
        if self.watch:
            self.watch(events)
        for event in events:
            if isinstance(event, Finished):
                client = self._client_of.pop(event.request_id)
                if self.scenario.clients[client].concurrency is not None:
                    self._submit_next(client, event.at)
