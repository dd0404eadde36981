"""A promise of a longest pause holds though reads from disk take twice as long: first tokens wait instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rota.core.events import Event, Produced
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.sim.cost import read_cost
from rota.sim.run import Simulation
from rota.workload.scenario import read_scenario

SCENARIO = Path(__file__).parents[2] / "benchmarks/scenarios/slow-disk.toml"


class Pauses:
    """The longest time between two tokens of each request."""

    def __init__(self) -> None:
        self._last_at: dict[RequestId, float] = {}
        self.longest: dict[RequestId, float] = {}

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        """A request that waits for its first token does not pause."""

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            for request_id in event.request_ids if isinstance(event, Produced) else ():
                paused_s = event.at - self._last_at.get(request_id, event.at)
                self.longest[request_id] = max(self.longest.get(request_id, 0.0), paused_s)
                self._last_at[request_id] = event.at


def test_reads_of_two_seconds_do_not_break_a_promise_of_one():
    pauses = Pauses()
    policy = PolicyConfig(lora_policy="rotate", lora_max_stall_ms=1000.0)
    asked = read_scenario(SCENARIO)
    assert asked.fetch_s == 2.0
    Simulation(scenario=asked, costs=read_cost("h200-llama8b"), policy=policy, seed=11, observers=(pauses,)).run()

    assert len(pauses.longest) == 300
    assert max(pauses.longest.values()) <= 1.0
