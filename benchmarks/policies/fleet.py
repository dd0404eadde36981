"""Several replicas behind one router: how many loads it saves, how much more they carry, and who is starved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from policies.runs import H200, HEADS, row, scenario
from policies.target import Section, Target
from rota.observe.summary import mean_of
from rota.runtime.replicas.router import Rule
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Scenario

# The rule was made while looking at seeds 11 and 12.
SEEDS = (301, 302, 303, 304)
ROUTERS: tuple[Rule, ...] = ("round-robin", "shortest-queue", "adapters")
REPLICAS = 8
LASTS_S = 30.0
# One replica's rate in the question how much eight carry: near the most at which it answers without a backlog.
CARRIED_PER_S = 35.0


def many_adapters(replicas: int, rate_per_s: float, lasts_s: float = LASTS_S) -> Scenario:
    """`many-adapters` for a while, at `rate_per_s` for each replica."""
    rate = replicas * rate_per_s
    return scenario("many-adapters", rate_per_s=rate, requests=round(rate * lasts_s))


def fleet(
    asked: Scenario, replicas: int, router: Rule = "adapters", seeds: Iterable[int] = SEEDS, cost: str = H200
) -> dict[str, Any]:
    """The mean of several runs."""
    return mean_of([_run(asked, replicas, router, seed, cost) for seed in seeds])


def _run(asked: Scenario, replicas: int, router: Rule, seed: int, cost: str) -> dict[str, Any]:
    run = Simulation(scenario=asked, costs=read_cost(cost), seed=seed, replicas=replicas, router=router)
    run.run()
    return run.summary()


def routers() -> Section:
    command = f"--replicas {REPLICAS} --routers {','.join(ROUTERS)} --cost {H200} --seed 301 --seeds 4"
    section = Section(
        f"many-adapters × 8 on 8 replicas, 400/s for 30 s, {H200}, 4 seeds",
        f"rota simulate benchmarks/scenarios/many-adapters-8.toml {command}",
    )
    found = {router: fleet(scenario("many-adapters-8"), REPLICAS, router) for router in ROUTERS}
    rows = [[*row(name, one), f"{one['loads']:,.0f}", f"{one['reads']:,.0f}"] for name, one in found.items()]
    section.add_table("", [*HEADS, "loads", "reads"], rows)
    reasons = found["adapters"]["routed"]
    section.add_table("Why requests went where", ["reason", "requests"], [[k, f"{v:,.0f}"] for k, v in reasons.items()])
    turn, own = found["round-robin"], found["adapters"]
    section.times_at_most("loads, of round robin's", own["loads"], turn["loads"], 0.7)
    section.times_at_most("TTFT P99, of round robin's", own["ttft_s"]["p99"], turn["ttft_s"]["p99"], 1.0)
    section.times_at_most("E2E P99, of round robin's", own["e2e_s"]["p99"], turn["e2e_s"]["p99"], 1.0)
    return section


def carried() -> Section:
    """Eight carry a rate if neither TTFT P99 nor E2E P99 is above that of one replica at its own rate."""
    section = Section(
        f"How much 8 replicas carry, many-adapters, {H200}, 4 seeds",
        "python benchmarks/simulated_fleet.py --only carried",
    )
    one = fleet(many_adapters(1, CARRIED_PER_S), 1)
    rows = [row(f"1 replica, {CARRIED_PER_S:g}/s", one)]
    for times in (7.6, 8.0, 10.0):
        eight = fleet(many_adapters(REPLICAS, CARRIED_PER_S * times / REPLICAS), REPLICAS)
        rows.append(row(f"8 replicas, {CARRIED_PER_S * times:g}/s ({times:g} ×)", eight))
        for name, figure in (("ttft_s", "TTFT P99"), ("e2e_s", "E2E P99")):
            if times == 7.6:
                section.times_at_most(f"{figure} at 7.6 × one's rate", eight[name]["p99"], one[name]["p99"], 1.0)
    section.add_table("", HEADS, rows)
    return section


def neighbours() -> Section:
    """Four replicas, and a burst four times as large."""
    section = Section(
        f"neighbours × 4 on 4 replicas, {H200}, 4 seeds", "python benchmarks/simulated_fleet.py --only neighbours"
    )
    asked = scenario("neighbours")
    burst, neighbour = asked.clients
    wide = replace(asked, clients=(replace(burst, requests=4 * burst.requests), neighbour))
    rows = []
    for router in ("round-robin", "adapters"):
        tenants = fleet(wide, 4, router)["tenants"]
        rows += [row(f"{tenant}, {router}", tenants[tenant]) for tenant in ("neighbour", "burst")]
    section.add_table("", HEADS, rows)
    section.at_most("TTFT P99 of the neighbour", tenants["neighbour"]["ttft_s"]["p99"], 0.5)
    failed = sum(tenant["failed"] for tenant in tenants.values())
    section.targets.append(Target("failed requests", "0", f"{failed:.0f}", failed == 0))
    return section
