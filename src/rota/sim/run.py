"""A simulation runs one scenario, with one seed and one set of policies, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rota.core.capacity import Capacity
from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.events import Event
from rota.core.ids import EngineId
from rota.core.policy_config import PolicyConfig
from rota.observe.observer import Observer
from rota.observe.summary import Recorder
from rota.policy.prefill_delayer import Exchange
from rota.runtime.loop import run
from rota.runtime.replicas.face import Router, Rule
from rota.scheduler import Scheduler
from rota.sim.cost import LinearCost
from rota.sim.fleet import Fleet, ReplicaResults
from rota.sim.fronts import Balancer, FleetRouter, Fronts
from rota.sim.traffic import SimulatedTraffic, adapter_name
from rota.sim.world import Mail, VirtualWorld
from rota.workload.scenario import Scenario

__all__ = ["Simulation", "adapter_name", "lora_config", "scheduler_config"]

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


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Runs once; `recorder` has the results, and `observers` are told of events as they happen.

    With several `replicas` the scenario's rates and slots are as they stand: its rates are of all replicas together,
    its slots, rows and KV blocks are each replica's own.
    """

    scenario: Scenario
    costs: LinearCost
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    seed: int = 0
    slots: int | None = None
    config: SchedulerConfig | None = None
    lora: LoraConfig | None = None
    observers: Sequence[Observer] = ()
    recorder: Recorder = field(default_factory=Recorder)
    replicas: int = 1
    router: Rule = "adapters"
    fronts: int = 1  # that share the replicas
    balancer: Balancer = "random"  # above the fronts
    adds_on_demand: bool = False  # an adapter is told to a replica with the first request for it, not at the start
    starts_at: float = field(init=False)
    results: list[ReplicaResults] = field(default_factory=list, init=False)  # of each replica, if there are several
    routed: Counter[str] = field(default_factory=Counter, init=False)  # requests by the reason for their replica
    _traffic: SimulatedTraffic = field(init=False)

    def run(self) -> Recorder:
        scenario = self.scenario
        config = self.config or scheduler_config(scenario)
        slots = scenario.slots if self.slots is None else self.slots
        lora = self.lora or lora_config(scenario, slots)
        fetch_s = self.costs.fetch_s if scenario.fetch_s is None else scenario.fetch_s
        rounds = math.ceil(scenario.adapters / lora.max_loaded_loras)  # of reads, when adapters are added
        self.starts_at = STARTS_AT if self.adds_on_demand else max(STARTS_AT, (rounds + 1) * fetch_s)
        build = partial(Scheduler, config, self._capacity(config, slots), self.policy, lora)
        if self.replicas == 1:
            world = VirtualWorld((), self.costs, fetch_s=fetch_s, pages_of=scenario.pages_of)
            self._begin(world)
            run(build(), world, self._emit, config.overlap_depth)
        else:
            self._run_fleet(build, config, fetch_s, slots)
        self.recorder.settle()
        return self.recorder

    def _run_fleet(
        self, build: Callable[[EngineId, Exchange], Scheduler], config: SchedulerConfig, fetch_s: float, slots: int
    ) -> None:
        mail, router = Mail(), self._router(config, slots)
        gathers = self.policy.prefill_delayer_exchange == "all-gather" if self.policy.enable_prefill_delayer else None
        fleet = Fleet(
            mail, router, self.replicas, self.costs, fetch_s, gathers, self.adds_on_demand, self.scenario.pages_of
        )
        self._begin(mail)
        schedulers = [build(EngineId(number), world) for number, world in enumerate(fleet.worlds)]
        fleet.run(schedulers, self._emit, config.overlap_depth, self.starts_at)
        self.results = fleet.results
        for (_, reason), count in router.routed.items():
            self.routed[reason.value] += count

    def _router(self, config: SchedulerConfig, slots: int) -> FleetRouter:
        each = self.replicas // self.fronts
        routers = [Router(each, self.router, config.enable_prefix_caching) for _ in range(self.fronts)]
        return Fronts(routers, self.replicas, self.balancer, slots, self.seed) if self.fronts > 1 else routers[0]

    def summary(self) -> dict[str, Any]:
        """The recorder's summary; of several replicas also what each of them did."""
        found = self.recorder.summary(adapter_name)
        if self.results:
            found["loads"] = sum(one.loads for one in self.results)
            found["reads"] = sum(one.reads for one in self.results)
            found["replicas"] = {f"replica {number}": one.summary() for number, one in enumerate(self.results)}
            found["routed"] = dict(sorted(self.routed.items()))
        return found

    def _begin(self, mail: Mail) -> None:
        self._traffic = SimulatedTraffic(self.scenario, self.seed, mail, self.recorder, self.replicas)
        self._traffic.begin(self.starts_at, self.costs.front_s, self.observers)

    def _capacity(self, config: SchedulerConfig, slots: int) -> Capacity:
        scenario = self.scenario
        return Capacity(
            blocks=scenario.kv_blocks,
            block_size=BLOCK_SIZE,
            rows=config.max_running_requests,
            max_sequence_tokens=scenario.context_length or max(SHORTEST_CONTEXT, scenario.longest),
            slots=slots,
            deep_prefix=_deep_prefix(self.costs),
            pages=scenario.pages,
        )

    def _emit(self, events: list[Event]) -> None:
        for observer in (self.recorder, *self.observers):
            observer.observe(events)
        self._traffic.observe(events)


def _deep_prefix(costs: LinearCost) -> int | None:
    return round(costs.long_prompt_token_s / costs.prefix_pair_s) if costs.prefix_pair_s else None
