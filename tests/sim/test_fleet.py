from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from rota.core.config import SchedulerConfig
from rota.core.errors import StuckError
from rota.core.events import Admitted, Finished, Produced
from rota.core.messages import Message, ServedElsewhere
from rota.runtime.loop import run
from rota.runtime.replicas.router import Router
from rota.scheduler import Scheduler
from rota.sim.cost import read_cost
from rota.sim.fleet import Fleet
from rota.sim.run import Simulation
from rota.sim.world import Mail, VirtualWorld
from rota.workload.scenario import Client, Scenario
from tests.builders import abort, add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.processes import run_program

COST = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05, front_s=0.003)
CROWD = Scenario(
    name="crowd",
    slots=2,
    clients=(
        Client(requests=80, rate_per_s=20.0, adapters=9, output_tokens=(1, 60), cancel_share=0.2, cancel_within_s=1.0),
        Client(requests=20, concurrency=3, output_tokens=(5, 30)),
    ),
    transients=4,
    transient_every_s=0.5,
)


def traffic() -> list[tuple[float, Message]]:
    """Requests for a few adapters and aborts, some at the same moments."""
    sent: list[tuple[float, Message]] = [(0.0, add_adapter(number)) for number in range(1, 5)]
    for number in range(60):
        at = 1.0 + number // 3 * 0.05
        sent.append((at, submit(f"r{number}", adapter=number % 5, max_new_tokens=3 + number % 17, arrived_at=at)))
        if number % 7 == 0:
            sent.append((at + 0.1, abort(f"r{number}", at + 0.1)))
    return sent


def scheduler(**fields: int) -> Scheduler:
    return Scheduler(SchedulerConfig(), capacity(rows=4, slots=2, blocks=200, **fields))


def serve(replicas: int, depth: int = 2) -> list:
    events: list = []
    fleet = Fleet(Mail(traffic()), Router(replicas), replicas, COST, COST.fetch_s)
    fleet.run([scheduler() for _ in range(replicas)], events.extend, depth, starts_at=0.0)
    return events


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fleet_of_one_replica_does_what_a_single_world_does_to_the_bit(depth):
    alone: list = []
    run(scheduler(), VirtualWorld(traffic(), COST), alone.extend, depth)

    assert serve(1, depth) == alone


@pytest.mark.parametrize("router", ["adapters", "round-robin", "shortest-queue"])
def test_every_request_ends_once_and_is_counted_at_one_replica(router):
    simulation = Simulation(scenario=CROWD, costs=COST, replicas=3, router=router, seed=4)
    summary = (simulation.run(), simulation.summary())[1]

    assert (summary["requests"], summary["failed"]) == (104, 0)
    parts = summary["replicas"]
    assert list(parts) == ["replica 0", "replica 1", "replica 2"]
    for count in ("requests", "left", "output_tokens", "loads", "reads"):
        assert sum(part[count] for part in parts.values()) == summary[count], count
    assert all(part["requests"] for part in parts.values())
    assert sum(summary["routed"].values()) == 104


def test_the_same_seed_gives_the_same_run_and_python_hashes_do_not_matter():
    program = (
        "from tests.sim.test_fleet import *\n"
        "one = Simulation(scenario=CROWD, costs=COST, replicas=3, seed=2)\n"
        "one.run()\n"
        "print(repr(one.summary()))"
    )
    outputs = [run_program([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]

    assert outputs[0] == outputs[1]
    assert "ttft_s" in outputs[0]


def test_no_replica_acts_before_the_past_of_another():
    """Events come in order of time, though every replica has a thread and a clock of its own."""
    moments = [max(event.at for event in batch) for batch in batches(replicas=4)]

    assert moments == sorted(moments)
    assert len(moments) > 50


def batches(replicas: int) -> list[list]:
    found: list[list] = []
    fleet = Fleet(Mail(traffic()), Router(replicas), replicas, COST, COST.fetch_s)
    fleet.run([scheduler() for _ in range(replicas)], found.append, 1, starts_at=0.0)
    # A plan without work is committed at its own moment; what a step did is told when the step is done.
    return [batch for batch in found if any(isinstance(event, Produced) for event in batch)]


def test_replicas_work_at_the_same_time():
    ends = {count: max(event.at for event in serve(count) if isinstance(event, Finished)) for count in (1, 4)}
    starts = {count: [event.at for event in serve(count) if isinstance(event, Admitted)] for count in (1, 4)}

    assert ends[4] < ends[1]
    assert sum(starts[4]) < sum(starts[1])


class Listener(Scheduler):
    """Remembers what it is told about service elsewhere."""

    heard: list[ServedElsewhere]

    def apply(self, message: Message) -> None:
        if isinstance(message, ServedElsewhere):
            self.heard.append(message)
        super().apply(message)


def test_what_a_tenant_gets_on_one_replica_counts_where_it_has_other_requests():
    asks = [(1.0, submit(f"{n}", tenant=name, prompt=8, max_new_tokens=5 + 9 * n)) for n, name in enumerate("aabb")]
    schedulers = [Listener(SchedulerConfig(), capacity()) for _ in range(2)]
    for one in schedulers:
        one.heard = []
    Fleet(Mail(asks), Router(2, "round-robin"), 2, COST, 0.0).run(schedulers, lambda _: None, 2, starts_at=0.0)

    # Each tenant's second request is the longer one, and runs on the second replica. When the first of "b" ends, "b" is
    # the only tenant there is.
    assert [one.heard for one in schedulers] == [[], [ServedElsewhere("a", 8, 5)]]


def test_a_loop_that_is_stuck_ends_the_run_with_its_error():
    stuck = scheduler()
    for _ in range(4):
        stuck._state.rows.take()  # rows that were lost
    fleet = Fleet(Mail(traffic()), Router(3), 3, COST, COST.fetch_s)

    with pytest.raises(StuckError, match="as many requests run as may run"):
        fleet.run([scheduler(), stuck, scheduler()], lambda _: None, 2, starts_at=0.0)


def test_a_client_that_fails_ends_the_run():
    def fail(_: list) -> None:
        raise OSError("no room for the journal")

    fleet = Fleet(Mail(traffic()), Router(3), 3, COST, COST.fetch_s)
    with pytest.raises(OSError, match="no room"):
        fleet.run([scheduler() for _ in range(3)], fail, 2, starts_at=0.0)


def test_eight_replicas_serve_eight_times_the_requests_of_one_as_fast():
    lengths = {"prompt_tokens": (300, 300), "output_tokens": (100, 100)}
    asked = Scenario(name="base", clients=(Client(requests=100, rate_per_s=10.0, **lengths),))
    wide = replace(asked, clients=(replace(asked.clients[0], requests=800, rate_per_s=80.0),))
    one, eight = (
        Simulation(scenario=scenario, costs=read_cost("h200-llama8b"), replicas=count).run().summary()
        for scenario, count in ((asked, 1), (wide, 8))
    )

    assert eight["e2e_s"]["mean"] <= 1.05 * one["e2e_s"]["mean"]
    assert eight["ttft_s"]["p99"] <= 1.1 * one["ttft_s"]["p99"]
