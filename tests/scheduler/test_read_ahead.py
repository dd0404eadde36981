"""Adapters that will come next are read before a slot is free, and no adapter leaves host memory that comes sooner."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.ids import AdapterId
from rota.core.messages import AdapterFetched, Message
from rota.core.plan import StepPlan
from rota.core.policy_config import PolicyConfig
from rota.runtime.loop import run
from rota.scheduler import Scheduler, reads
from rota.sim import LinearCost, VirtualWorld
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario
from tests.builders import add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.scheduler.stage import Stage

POLICIES = {
    "wait": PolicyConfig(lora_policy="wait"),
    "drain": PolicyConfig(lora_policy="drain", lora_drain_wait_threshold=0.5),
    "rotate": PolicyConfig(lora_policy="rotate"),
}


def on_disk(host_adapters: int, *adapters: int, policy: str = "wait", paths: Mapping[int, str] | None = None) -> Stage:
    """One slot, and room in host memory for the last of the adapters that were added."""
    lora = LoraConfig(max_loras_per_batch=1, max_loaded_loras=host_adapters)
    stage = Stage(adapters=0, slots=1, policy=POLICIES[policy], lora=lora)
    for number in adapters:
        stage.tell(add_adapter(number, path=(paths or {}).get(number, f"adapters/{number}")))
        stage.step()
        stage.tell(AdapterFetched(adapter_id=AdapterId(number), at=0.0))
    return stage


def fetched(plan: StepPlan) -> list[int]:
    return [adapter.adapter_id for adapter in plan.fetches]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_adapter_is_read_while_another_that_lies_in_host_memory_still_waits_before_it(policy):
    stage = on_disk(3, 2, 3, 4, 1, policy=policy)
    stage.seat(1)
    stage.ask("at hand", adapter=4, at=-1.0)
    stage.ask("behind it", adapter=2)

    plan = stage.step()
    assert (fetched(plan), plan.drops) == ([2], (3,)), "adapter 3 has no request"
    assert fetched(stage.step()) == [], "it is on its way"


def test_no_adapter_is_dropped_that_comes_sooner_nor_the_one_in_the_slot():
    stage = on_disk(3, 2, 3, 4, 1)
    stage.seat(1)
    for adapter, at in ((4, -2.0), (3, -1.0), (2, 0.0)):
        stage.ask(f"waits{adapter}", adapter, at=at)

    for _ in range(3):
        plan = stage.step()
        assert (fetched(plan), plan.drops) == ([], ())


def test_an_adapter_that_comes_last_makes_room_for_one_that_comes_sooner():
    stage = on_disk(3, 2, 3, 4, 1)
    stage.seat(1)
    for adapter, at in ((4, -3.0), (2, -2.0), (3, -1.0)):
        stage.ask(f"waits{adapter}", adapter, at=at)

    plan = stage.step()
    assert (fetched(plan), plan.drops) == ([2], (3,))


def test_two_adapters_are_read_ahead_at_a_time():
    stage = on_disk(8, *range(3, 12), 2, 1)
    stage.seat(1)
    stage.ask("at hand", adapter=2, at=-9.0)
    for adapter in (3, 4, 5):
        stage.ask(f"waits{adapter}", adapter)

    assert fetched(stage.step()) == [3, 4]
    stage.tell(AdapterFetched(adapter_id=AdapterId(3), at=0.0))
    assert fetched(stage.step()) == [5]


def test_slow_sources_keep_no_adapter_on_disk_from_being_read_ahead():
    far = {number: f"s3://adapters/{number}" for number in range(10, 15)}
    stage = on_disk(12, *far, 20, 21, *range(30, 40), 2, 1, paths=far)
    stage.seat(1)
    stage.ask("at hand", adapter=2, at=-9.0)
    for at, adapter in enumerate([*far, 20, 21], start=-8):
        stage.ask(f"waits{adapter}", adapter, at=float(at))

    assert fetched(stage.step()) == [10, 11, 12, 13, 20, 21], "four from sources, and two from the disk beside them"
    assert fetched(stage.step()) == []
    stage.tell(AdapterFetched(adapter_id=AdapterId(11), at=0.0))
    assert fetched(stage.step()) == [14]


class Reading(VirtualWorld):
    """Remembers reads and copies in their order."""

    def __init__(self, messages: list[tuple[float, Message]], costs: LinearCost) -> None:
        super().__init__(messages, costs)
        self.orders: list[tuple[str, int]] = []

    def submit(self, plan: StepPlan) -> tuple[float, tuple[int, ...]]:
        self.orders += [("read", adapter.adapter_id) for adapter in plan.fetches]
        self.orders += [("copied", load.adapter_id) for load in plan.loads]
        return super().submit(plan)


@pytest.mark.parametrize("policy", ["wait", "drain"])
@pytest.mark.parametrize("host_adapters", [2, 4])
def test_no_adapter_is_read_twice_before_it_is_used_while_host_memory_is_full(policy, host_adapters):
    for seed in range(3):
        dice = random.Random(seed)
        messages: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 11)]
        for number in range(100):
            at, adapter, length = 2.0 + dice.randrange(300) / 50, 1 + dice.randrange(10), dice.choice([3, 60])
            ask = submit(f"r{number:03}", adapter=AdapterId(adapter), max_new_tokens=length, arrived_at=at)
            messages.append((at, ask))
        world = Reading(messages, constant_cost(seconds=0.02, load_s=0.01, fetch_s=0.15))
        lora = LoraConfig(max_loras_per_batch=2, max_loaded_loras=host_adapters)
        found = capacity(blocks=2000, rows=64, slots=2)
        run(Scheduler(SchedulerConfig(), found, POLICIES[policy], lora), world, lambda _: None)

        unused: set[int] = set()
        first_reads = 10  # when adapters are added, to check them
        for order, adapter in world.orders[first_reads:]:
            if order == "copied":
                unused.discard(adapter)
            else:
                assert adapter not in unused
                unused.add(adapter)


SLOW_DISK = Scenario(
    name="slow disk",
    slots=3,
    max_loaded_loras=6,
    fetch_s=2.0,
    clients=(Client(requests=120, rate_per_s=6.0, prompt_tokens=(1, 512), output_tokens=(1, 256), adapters=16),),
)


@pytest.mark.parametrize("policy", ["wait", "drain"])
def test_with_a_slow_disk_reading_ahead_brings_first_tokens_and_answers_sooner(policy, monkeypatch):
    def summary() -> dict:
        costs = constant_cost(seconds=0.01, load_s=0.002)
        simulation = Simulation(scenario=SLOW_DISK, costs=costs, policy=POLICIES[policy], seed=11)
        return simulation.run().summary()

    ahead = summary()
    monkeypatch.setattr(reads, "MOST_AHEAD", 0)
    behind = summary()

    assert ahead["ttft_s"]["mean"] < 0.9 * behind["ttft_s"]["mean"]
    assert ahead["ttft_s"]["p99"] < behind["ttft_s"]["p99"]
    assert ahead["e2e_s"]["mean"] < 0.95 * behind["e2e_s"]["mean"]
