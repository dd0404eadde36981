"""Slots that share pages hold more adapters in the same memory than slots of the largest rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rota.core.events import Event, SlotChanged, SlotState
from rota.core.policy_config import PolicyConfig
from rota.observe.observer import Observer
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario
from tests.costs import constant_cost

COST = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05)
PAGES = 36
# Twenty adapters of one page and two of eight; a slot for any of them would take eight pages.
MIXED = Scenario(
    name="mixed",
    slots=22,
    pages=PAGES,
    adapter_pages=(1,) * 10 + (8,),
    clients=(Client(requests=150, rate_per_s=40.0, adapters=22, output_tokens=(1, 40)),),
)
UNIFORM = replace(MIXED, slots=PAGES // 8, pages=0, adapter_pages=())


class Copies(Observer):
    """Counts each adapter's copies into slots."""

    def __init__(self) -> None:
        self.by_adapter: Counter[int] = Counter()

    def observe(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, SlotChanged) and event.state is SlotState.LOADING:
                self.by_adapter[event.adapter_id] += 1


def copies(scenario: Scenario, policy: str, replicas: int = 1) -> Counter[int]:
    seen = Copies()
    config = PolicyConfig(lora_policy=policy)
    simulation = Simulation(scenario=scenario, costs=COST, policy=config, observers=[seen], replicas=replicas)
    summary = simulation.run().summary()
    assert (summary["requests"], summary["failed"]) == (150, 0)
    return seen.by_adapter


@pytest.mark.parametrize("policy", ["rotate", "drain", "wait"])
def test_where_all_fit_by_their_pages_each_is_copied_once_and_in_uniform_slots_they_take_turns(policy):
    paged, uniform = copies(MIXED, policy), copies(UNIFORM, policy)

    assert set(paged.values()) == {1}
    assert uniform.total() > 2 * paged.total()


@pytest.mark.parametrize("policy", ["rotate", "drain", "wait"])
def test_with_fewer_pages_some_slots_are_closed_and_every_request_ends(policy):
    assert copies(replace(MIXED, pages=20), policy).total() > 22


def test_replicas_have_pages_of_their_own():
    assert copies(MIXED, "rotate", replicas=2).keys() == copies(MIXED, "rotate").keys()
