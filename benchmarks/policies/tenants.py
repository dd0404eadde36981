"""Tenants side by side: a burst of one tenant, or its many adapters, should not reach its neighbour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policies.runs import H200, HEADS, ROTATE, WAIT, mean, row, scenario
from policies.target import Section
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.observe.summary import Recorder, mean_of
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import Scenario

SEEDS = range(4)
EXISTING = ("tail-ttft", "base-isolation", "overload", "cancel-storm", "osl-variance")


def neighbours() -> Section:
    """300 answers of 4,000 tokens at once, and a neighbour that asks the base model every other second."""
    section = Section(
        f"neighbours, {H200}, 4 seeds", f"rota simulate benchmarks/scenarios/neighbours.toml --cost {H200} --seeds 4"
    )
    asked = scenario("neighbours")
    alone = mean(replace(asked, clients=asked.clients[:1]), H200, ROTATE, SEEDS)["tenants"]["burst"]
    rows = [row("burst alone", alone)]
    for title, blocks in (("", asked.kv_blocks), (", KV for a fifth of it", 16_384)):
        sized = replace(asked, kv_blocks=blocks)
        plain, fair = _by_client(sized), mean(sized, H200, ROTATE, SEEDS)["tenants"]
        rows += [row(f"{name}{title}, one tenant", plain[name]) for name in ("burst", "neighbour")]
        rows += [row(f"{name}{title}, two tenants", fair[name]) for name in ("burst", "neighbour")]
        section.at_most(f"neighbour's TTFT median{title}", fair["neighbour"]["ttft_s"]["median"], 0.1)
        section.at_most(f"neighbour's TTFT P99{title}", fair["neighbour"]["ttft_s"]["p99"], 0.5)
        tokens = [one["burst"]["output_tokens_per_s"] for one in (fair, plain)]
        section.times_at_least(f"burst's tok/s against one tenant{title}", *tokens, 0.95)
    section.add_table("", HEADS, rows)
    return section


def neighbours_slots() -> Section:
    """64 busy adapters of one tenant on eight slots, and a neighbour with one adapter."""
    section = Section(
        f"neighbours-slots, 8 slots, {H200}, 4 seeds",
        f"rota simulate benchmarks/scenarios/neighbours-slots.toml --cost {H200} --seeds 4 --compare wait,rotate",
    )
    asked = scenario("neighbours-slots")
    rows = []
    for name, policy in (("wait", WAIT), ("rotate", ROTATE)):
        plain, fair = _by_client(asked, policy), mean(asked, H200, policy, SEEDS)["tenants"]
        rows += [row(f"{tenant}, one tenant, {name}", plain[tenant]) for tenant in ("many", "one")]
        rows += [row(f"{tenant}, two tenants, {name}", fair[tenant]) for tenant in ("many", "one")]
        section.at_most(f"TTFT P99 of the tenant with one adapter, {name}", fair["one"]["ttft_s"]["p99"], 0.5)
    section.add_table("", HEADS, rows)
    return section


def every_adapter_a_tenant() -> Section:
    """The scenarios that have no tenants, with a tenant for each adapter: fairness should cost them nothing."""
    section = Section(f"every adapter a tenant, {H200}, 4 seeds", "python benchmarks/simulated_policies.py")
    rows = []
    for name in EXISTING:
        plain, fair = (mean(scenario(name, tenant=tenant), H200, ROTATE, SEEDS) for tenant in ("", "*"))
        rows += [row(f"{name}, one tenant", plain), row(f"{name}, a tenant for each adapter", fair)]
        section.times_at_most(f"{name}: E2E mean", fair["e2e_s"]["mean"], plain["e2e_s"]["mean"], 1.02)
    section.add_table("", HEADS, rows)
    return section


class ByClient(Recorder):
    """Counts each client's requests as a tenant's, though the scheduler does not know of tenants."""

    names: tuple[str, ...] = ()

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        super().asked(request_id, adapter, at)
        self.note_tenant(request_id, self.names[int(request_id.partition("-")[0])])


def _by_client(asked: Scenario, policy: PolicyConfig = ROTATE) -> dict[str, Any]:
    """How the clients of each tenant fare in one queue for all."""
    plain = replace(asked, clients=tuple(replace(client, tenant="") for client in asked.clients))
    runs = []
    for seed in SEEDS:
        recorder = ByClient()
        recorder.names = tuple(client.tenant for client in asked.clients)
        Simulation(scenario=plain, costs=read_cost(H200), policy=policy, seed=seed, recorder=recorder).run()
        runs.append(recorder.summary()["tenants"])
    return mean_of(runs)
