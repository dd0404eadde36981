from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rota.core.events import AdapterAdded, Admitted, Event, SlotChanged, SlotState
from rota.core.ids import BASE, AdapterId, EngineId, RequestId, Slot
from rota.runtime.replicas.router import Router
from rota.sim.fronts import BALANCERS, SCRAPE_S, Fronts, Picker
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario
from tests.builders import request
from tests.costs import constant_cost

COST = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05, front_s=0.003)
CROWD = Scenario(
    name="crowd",
    slots=2,
    clients=(Client(requests=120, rate_per_s=40.0, adapters=9, output_tokens=(1, 40), base_share=0.1),),
)


def in_slot(adapter: int, state: SlotState = SlotState.READY, engine: int = 0) -> Event:
    return SlotChanged(at=0.0, slot=Slot(0), adapter_id=AdapterId(adapter), state=state, engine_id=EngineId(engine))


class Added:
    """Remembers which engine has added which adapter."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()

    def asked(self, *_: Any) -> None:
        """Only what engines tell counts."""

    def observe(self, events: list[Event]) -> None:
        self.seen.update((one.engine_id, one.adapter_id) for one in events if isinstance(one, AdapterAdded))


# ── fronts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("balancer", BALANCERS)
def test_every_request_ends_once_behind_any_balancer(balancer):
    simulation = Simulation(scenario=CROWD, costs=COST, replicas=6, fronts=3, balancer=balancer, seed=4)
    simulation.run()
    summary = simulation.summary()

    assert (summary["requests"], summary["failed"]) == (120, 0)
    assert sum(part["requests"] for part in summary["replicas"].values()) == 120
    assert sum(summary["routed"].values()) == 120


def test_the_same_seed_gives_the_same_run():
    runs = [Simulation(scenario=CROWD, costs=COST, replicas=4, fronts=2, balancer="picker", seed=3) for _ in range(2)]
    for one in runs:
        one.run()

    assert runs[0].summary() == runs[1].summary()


def test_by_the_adapter_all_its_requests_go_to_one_front():
    fronts = Fronts([Router(2) for _ in range(3)], 6, "adapter", slots=2)
    taken: dict[int, set[int]] = {}
    for number in range(60):
        choice = fronts.route(request(f"r{number}", adapter=AdapterId(1 + number % 7)), 0.0)
        taken.setdefault(1 + number % 7, set()).add(choice.replica // 2)

    assert all(len(one) == 1 for one in taken.values())
    assert len(set.union(*taken.values())) > 1


def test_a_replica_of_a_later_front_is_known_by_its_number_among_all():
    fronts = Fronts([Router(2) for _ in range(3)], 6, "adapter", slots=2)
    choice = fronts.route(request("r0", adapter=AdapterId(1)), 0.0)
    front = choice.replica // 2
    fronts.note_events(2 * front + 1, [in_slot(1)])

    assert fronts.replica_of(RequestId("r0")) == choice.replica
    assert fronts.replica_of(RequestId("never")) is None
    assert list(fronts.routed) == [(choice.replica, choice.reason)]


# ── the picker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def picked(picker: Picker, adapter: int, now: float) -> set[int]:
    return {picker.pick(AdapterId(adapter), now) for _ in range(40)}


def test_the_picker_prefers_the_front_where_an_adapter_is_ready_once_it_was_told():
    picker = Picker(3, 2, random.Random(1))
    picker.observe(1, [in_slot(7)])

    assert picked(picker, 7, SCRAPE_S / 2) == {0, 1, 2}
    assert picked(picker, 7, SCRAPE_S) == {1}
    assert picked(picker, 8, SCRAPE_S) == {0, 1, 2}, "all have a slot to spare"
    assert picked(picker, BASE, SCRAPE_S) == {0, 1, 2}
    picker.observe(1, [in_slot(7, SlotState.EMPTY)])
    assert picked(picker, 7, 2 * SCRAPE_S) == {0, 1, 2}


def test_the_picker_leaves_full_fronts_and_long_queues():
    picker = Picker(2, 1, random.Random(1))
    picker.observe(0, [in_slot(7)])
    assert picked(picker, 8, SCRAPE_S) == {1}

    for number in range(3):
        picker.asked(1, request(f"r{number}", adapter=BASE))
    assert picked(picker, BASE, 2 * SCRAPE_S) == {0}
    picker.observe(1, [Admitted(request_id=RequestId(f"r{number}"), at=0.0, cached_tokens=0) for number in range(3)])
    assert picked(picker, BASE, 3 * SCRAPE_S) == {0, 1}


# ── adapters on demand ───────────────────────────────────────────────────────────────────────────────────────────────


def test_on_demand_a_replica_hears_of_an_adapter_once_and_only_if_it_is_asked_for():
    added = Added()
    wide = replace(CROWD, clients=(replace(CROWD.clients[0], adapters=200, distribution="zipf"),))
    simulation = Simulation(scenario=wide, costs=COST, replicas=3, adds_on_demand=True, observers=[added])
    records = simulation.run().records.values()

    assert all(record.is_answered for record in records)
    assert {adapter for _, adapter in added.seen} == {record.adapter_id for record in records} - {BASE}
    assert set(added.seen.values()) == {1}
    assert len(added.seen) < 3 * 200
