"""Fleets of 8 to 512 replicas with 10,000 adapters, behind one front or behind several that share the replicas."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.runs import H200, scenario
from rota.core.config import SchedulerConfig
from rota.core.events import Event
from rota.core.request import Request
from rota.observe.summary import RequestRecord, spread
from rota.policy.routing import RouteReason, RoutingChoice
from rota.sim.cost import read_cost
from rota.sim.fronts import BALANCERS, Balancer, FleetRouter
from rota.sim.run import Simulation

ADAPTERS = 10_000
RATE_PER_S = 35.0  # for each replica
LASTS_S, WARMS_S = (
    4.0,
    1.5,
)  # of requests, and of these the first that do not count: adapters are read for the first time


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A fleet: its replicas, and the fronts that share them."""

    name: str
    replicas: int
    fronts: int = 1
    balancer: Balancer = "random"


def _shared(replicas: int, fronts: int) -> list[Shape]:
    return [Shape(name=f"{replicas}-{one}", replicas=replicas, fronts=fronts, balancer=one) for one in BALANCERS]


ALONE = [Shape(name=str(replicas), replicas=replicas) for replicas in (8, 64, 512)]
SHAPES = {shape.name: shape for shape in (*ALONE, *_shared(64, 16), *_shared(512, 8))}


class TimedRouter:
    """A router, and the processor's time that it takes."""

    def __init__(self, router: FleetRouter) -> None:
        self._router = router
        self.replica_of = router.replica_of
        self.choices_s: list[float] = []
        self.notes_s = 0.0
        self.notes = 0

    @property
    def routed(self) -> Counter[tuple[int, RouteReason]]:
        return self._router.routed

    def route(self, request: Request, now: float) -> RoutingChoice:
        began_at = time.thread_time()
        choice = self._router.route(request, now)
        self.choices_s.append(time.thread_time() - began_at)
        return choice

    def note_events(self, replica: int, events: Sequence[Event]) -> None:
        began_at = time.thread_time()
        self._router.note_events(replica, events)
        self.notes_s += time.thread_time() - began_at
        self.notes += 1


class TimedSimulation(Simulation):
    timed: TimedRouter

    def _router(self, config: SchedulerConfig, slots: int) -> FleetRouter:
        self.timed = TimedRouter(super()._router(config, slots))
        return self.timed


def run(shape: Shape, seed: int) -> dict[str, Any]:
    """One run; requests of the first moments are left out of the times."""
    rate = shape.replicas * RATE_PER_S
    asked = scenario("many-adapters", rate_per_s=rate, requests=round(rate * LASTS_S), adapters=ADAPTERS)
    one = TimedSimulation(
        scenario=asked,
        costs=read_cost(H200),
        seed=seed,
        replicas=shape.replicas,
        fronts=shape.fronts,
        balancer=shape.balancer,
        adds_on_demand=True,
    )
    began_s = time.process_time()
    records = [*one.run().records.values()]
    taken_s = time.process_time() - began_s
    counted = [record for record in records if record.asked_at >= one.starts_at + WARMS_S]
    return {
        "replicas": shape.replicas,
        "fronts": shape.fronts,
        "balancer": shape.balancer if shape.fronts > 1 else None,
        "seed": seed,
        "processor_s": round(taken_s, 1),
        "requests": len(records),
        "counted": len(counted),
        "failed": sum(not record.is_answered for record in records),
        "loads": sum(found.loads for found in one.results),
        "reads": sum(found.reads for found in one.results),
        **_times(counted),
        "requests_each": spread([len(found.recorder.records) for found in one.results]),
        **_router_cost(one.timed, one.recorder.summary()["duration_s"]),
    }


def _times(counted: list[RequestRecord]) -> dict[str, Any]:
    return {
        "ttft_s": spread([record.first_at - record.asked_at for record in counted]),
        "e2e_s": spread([record.ended_at - record.asked_at for record in counted]),
    }


def _router_cost(timed: TimedRouter, lasted_s: float) -> dict[str, Any]:
    return {
        "route_us": round(statistics.median(timed.choices_s) * 1e6, 1),
        "route_p99_us": round(float(np.quantile(timed.choices_s, 0.99)) * 1e6, 1),
        "note_us": round(timed.notes_s / timed.notes * 1e6, 1),
        "router_share": round((sum(timed.choices_s) + timed.notes_s) / lasted_s, 3),  # of one core, in virtual time
    }
