"""What a scenario can say about its requests, and that the simulated server sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rota.core.events import AdapterAdded, AdapterRemoved, Admitted, Event, Finished, FinishReason
from rota.core.ids import AdapterId, RequestId
from rota.core.policy_config import PolicyConfig
from rota.observe.summary import Recorder
from rota.sim.run import STARTS_AT, Simulation
from rota.workload.scenario import Client, Scenario, read_scenario
from tests.costs import constant_cost

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
STEP = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05)
ONE = Client(requests=1, rate_per_s=1.0, prompt_tokens=(40, 40), output_tokens=(20, 20))


@dataclass
class Witness:
    """Keeps every event."""

    events: list[Event] = field(default_factory=list)

    def asked(self, request_id: RequestId, adapter: AdapterId, at: float, _tenant: str = "") -> None:
        """Only events are kept."""

    def observe(self, events: Iterable[Event]) -> None:
        self.events += events

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def witnessed(scenario: Scenario, **options: object) -> Witness:
    witness = Witness()
    Simulation(scenario=scenario, costs=STEP, observers=[witness], **options).run()
    return witness


def recorded(*clients: Client, **fields: object) -> Recorder:
    return Simulation(scenario=Scenario(name="one", clients=clients, **fields), costs=STEP).run()


def test_an_answer_stops_by_itself_at_its_length_although_its_limit_is_larger():
    (end,) = witnessed(Scenario(name="one", clients=(replace(ONE, max_tokens=500),))).of(Finished)

    assert (end.reason, end.output_tokens) == (FinishReason.STOP, 20)


def test_a_limit_below_the_length_of_the_answer_cuts_it_off():
    (end,) = witnessed(Scenario(name="one", clients=(replace(ONE, max_tokens=5),))).of(Finished)

    assert (end.reason, end.output_tokens) == (FinishReason.LENGTH, 5)


def test_answers_with_a_limit_and_answers_without_take_turns_at_the_same_rows():
    lengths = {"output_tokens": (1, 60), "requests": 40, "rate_per_s": 20.0}
    scenario = Scenario(
        name="both", max_running_requests=3, clients=(replace(ONE, **lengths), replace(ONE, **lengths, max_tokens=900))
    )
    ends = witnessed(scenario).of(Finished)

    reasons = {(end.request_id.partition("-")[0], end.reason) for end in ends}
    assert reasons == {("0", FinishReason.LENGTH), ("1", FinishReason.STOP)}


def test_an_answer_that_is_preempted_still_stops_where_it_would_have():
    many = Client(requests=30, rate_per_s=50.0, prompt_tokens=(60, 60), output_tokens=(100, 100))
    roomy, cramped = (
        witnessed(Scenario(name="kv", kv_blocks=blocks, clients=(replace(many, max_tokens=2000),))).events
        for blocks in (4096, 60)
    )

    assert any(type(event).__name__ == "Preempted" for event in cramped)
    for events in (roomy, cramped):
        ends = [event for event in events if isinstance(event, Finished)]
        assert {(end.reason, end.output_tokens) for end in ends} == {(FinishReason.STOP, 100)}


def test_a_limit_that_the_answer_does_not_need_changes_no_moment():
    plain, limited = (
        recorded(replace(ONE, requests=20, rate_per_s=10.0, output_tokens=(1, 80), max_tokens=limit)).summary()
        for limit in (None, 80)
    )

    assert plain == limited


def test_prompts_that_begin_alike_find_their_beginning_in_the_cache():
    client = replace(ONE, requests=10, prompt_tokens=(100, 120), shared_prefix_tokens=64)
    found = [one.cached_tokens for one in witnessed(Scenario(name="shared", clients=(client, client))).of(Admitted)]

    # The first of each client computes the 64 tokens, the others find them; what follows them is never alike.
    assert Counter(found) == {0: 2, 64: 18}


def test_adapters_do_not_find_each_other_s_beginnings():
    client = replace(ONE, requests=12, prompt_tokens=(100, 120), shared_prefix_tokens=64, adapters=3)
    scenario = Scenario(name="shared", slots=3, clients=(replace(client, distribution="distinct"),))
    found = [one.cached_tokens for one in witnessed(scenario).of(Admitted)]

    assert Counter(found) == {0: 3, 64: 9}


def test_prompts_of_128k_tokens_are_served():
    long = replace(ONE, prompt_tokens=(128_000, 128_000))
    assert recorded(long, kv_blocks=8_100).summary()["failed"] == 0


def test_a_context_that_is_shorter_than_a_prompt_refuses_it():
    summary = recorded(replace(ONE, prompt_tokens=(300, 300)), ONE, context_length=300).summary()
    assert (summary["requests"], summary["failed"]) == (2, 1)


def test_an_urgent_client_goes_first():
    line = replace(ONE, requests=20, rate_per_s=1000.0)
    late = replace(ONE, starts_after_s=0.2)
    waits = {
        priority: recorded(line, replace(late, priority=priority), max_running_requests=1).records["1-0000000"]
        for priority in (0, 1)
    }

    assert waits[1].first_at - waits[1].asked_at < 0.5 < 2.0 < waits[0].first_at - waits[0].asked_at


def test_an_adapter_with_a_larger_weight_gets_more():
    busy = Client(requests=120, rate_per_s=100.0, prompt_tokens=(9, 9), output_tokens=(200, 200), adapters=2)
    tokens = {}
    for weights in ((), (1.0, 8.0)):
        scenario = Scenario(name="weights", slots=1, weights=weights, clients=(replace(busy, distribution="distinct"),))
        records = Simulation(scenario=scenario, costs=STEP, policy=PolicyConfig(lora_policy="rotate")).run().records
        ends = {adapter: [one.ended_at for one in records.values() if one.adapter_id == adapter] for adapter in (1, 2)}
        tokens[weights] = sum(ends[1]) / sum(ends[2])

    assert tokens[1.0, 8.0] > 1.1 * tokens[()]


def test_a_burst_comes_at_one_moment_and_as_often_as_the_rate_says():
    client = Client(requests=1000, rate_per_s=40.0, burst=50, output_tokens=(1, 2))
    moments = Counter(one.asked_at for one in recorded(client, max_running_requests=256).records.values())

    assert set(moments.values()) == {50}
    assert max(moments) - STARTS_AT == pytest.approx(1000 / 40.0, rel=0.5)


def test_a_client_with_an_endless_rate_asks_for_everything_at_once(tmp_path):
    path = tmp_path / "at-once.toml"
    path.write_text("[[clients]]\nrequests = 30\nrate_per_s = inf\nstarts_after_s = 2.0\n")
    recorder = Simulation(scenario=read_scenario(path), costs=STEP).run()

    assert {one.asked_at for one in recorder.records.values()} == {STARTS_AT + 2.0}


def test_twenty_adapters_a_second_come_are_asked_and_go_beside_regulars():
    scenario = Scenario(
        name="churn",
        slots=4,
        transients=40,
        transient_every_s=0.05,
        transient_stays_s=0.3,
        transient_requests=3,
        clients=(Client(requests=20, rate_per_s=8.0, output_tokens=(1, 8), adapters=6),),
    )
    witness = witnessed(scenario)
    added = [event.at for event in witness.of(AdapterAdded) if event.adapter_id > 6]
    ends = [end for end in witness.of(Finished) if end.request_id.startswith("transient")]

    assert len(added) == len(witness.of(AdapterRemoved)) == 40
    assert added[-1] - added[0] == pytest.approx(39 * 0.05, rel=0.05)
    assert len({end.request_id for end in ends}) == len(ends) == 120
    assert {end.reason for end in ends} == {FinishReason.LENGTH}


def test_a_slow_disk_is_waited_for_before_the_first_request_and_at_every_read():
    client = Client(requests=40, rate_per_s=4.0, output_tokens=(1, 30), adapters=6)
    scenario = Scenario(name="disk", slots=2, fetch_s=2.0, clients=(client,))
    simulations = [
        Simulation(scenario=replace(scenario, max_loaded_loras=copies), costs=STEP, policy=PolicyConfig())
        for copies in (6, 2)
    ]
    all_fit, two_fit = (simulation.run().summary()["ttft_s"]["max"] for simulation in simulations)

    assert [simulation.starts_at for simulation in simulations] == [4.0, 8.0]
    assert all_fit < 0.5 < 2.0 < two_fit


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_runs_and_loses_no_request(path):
    scenario = read_scenario(path)
    fewer = tuple(replace(client, requests=min(client.requests, 12)) for client in scenario.clients)
    shorter = replace(scenario, clients=fewer, transients=min(scenario.transients, 5))
    summary = Simulation(scenario=shorter, costs=STEP).run().summary()

    assert summary["failed"] == 0
    assert summary["requests"] == sum(client.requests for client in fewer) + shorter.transients * (
        scenario.transient_requests
    )
