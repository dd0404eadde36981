from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from rota.core.config import LoraConfig, SchedulerConfig
from rota.core.policy_config import PolicyConfig
from rota.observe.summary import jain
from rota.sim.cost import read_cost
from rota.sim.run import Simulation, adapter_name, lora_config
from rota.workload.scenario import Client, Scenario
from tests.costs import constant_cost
from tests.processes import run_program

COST = constant_cost(seconds=0.01, load_s=0.002, fetch_s=0.05)
CROWD = Scenario(
    name="crowd", slots=2, clients=(Client(requests=60, rate_per_s=8.0, adapters=5, output_tokens=(1, 80)),)
)


def test_every_request_is_served_and_known_by_its_adapter():
    summary = Simulation(scenario=CROWD, costs=COST).run().summary(adapter_name)

    assert (summary["requests"], summary["failed"]) == (60, 0)
    assert list(summary["adapters"]) == [f"adapter{number}" for number in range(1, 6)]


@pytest.mark.parametrize("policy", ["wait", "drain", "rotate"])
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(policy):
    config = PolicyConfig(lora_policy=policy, lora_drain_wait_threshold=1.0)
    once, again, other = (
        Simulation(scenario=CROWD, costs=COST, policy=config, seed=seed).run().summary() for seed in (1, 1, 2)
    )

    assert once == again
    assert once != other


def test_a_run_does_not_depend_on_how_python_hashes():
    program = (
        "from tests.sim.test_run import *\n"
        "print(repr(Simulation(scenario=CROWD, costs=COST, policy=PolicyConfig(lora_policy='rotate')).run().summary()))"
    )
    outputs = {run_program([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1
    assert "ttft_s" in outputs.pop()


def test_a_front_end_delays_every_first_token_and_no_other():
    client = Client(requests=5, rate_per_s=0.1, prompt_tokens=(5, 5), output_tokens=(4, 4))
    alone, behind = (
        Simulation(
            scenario=Scenario(name="few", clients=(client,)), costs=constant_cost(seconds=0.01, front_s=front_s)
        ).run()
        for front_s in (0.0, 0.003)
    )
    for one, other in zip(alone.records.values(), behind.records.values(), strict=True):
        assert one.asked_at == other.asked_at
        assert other.first_at - one.first_at == pytest.approx(0.003)
        assert other.ended_at - one.ended_at == pytest.approx(0.003)


@pytest.mark.parametrize(("share", "guided"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_only_requests_with_a_grammar_pay_for_masks(share, guided):
    client = Client(requests=4, rate_per_s=0.1, prompt_tokens=(5, 5), output_tokens=(4, 4), grammar_share=share)
    costs = constant_cost(seconds=0.01, mask_s=0.5)
    records = Simulation(scenario=Scenario(name="few", clients=(client,)), costs=costs).run().records.values()

    taken = sorted(record.ended_at - record.asked_at for record in records)
    assert taken == pytest.approx([4 * 0.01] * (4 - guided) + [4 * 0.51] * guided)


def test_a_closed_loop_asks_again_when_an_answer_is_complete_and_never_sooner():
    client = Client(requests=12, concurrency=3, prompt_tokens=(5, 5), output_tokens=(10, 10))
    recorder = Simulation(scenario=Scenario(name="loop", clients=(client,)), costs=constant_cost(seconds=1.0)).run()
    records = list(recorder.records.values())

    assert len(records) == 12
    for record in records:
        open_then = [one for one in records if one.asked_at <= record.asked_at < one.ended_at]
        assert len(open_then) <= 3


def test_clients_who_leave_get_no_more_than_what_the_device_has_begun():
    scenario = replace(CROWD, clients=(replace(CROWD.clients[0], cancel_share=1.0, cancel_within_s=0.2),))
    recorder = Simulation(scenario=scenario, costs=COST).run()

    assert all(one.ended_at - one.asked_at <= 0.2 + 1e-9 for one in recorder.records.values())
    assert all(not one.last_at > one.ended_at + 2 * COST.base_s for one in recorder.records.values())


def test_no_two_prompts_begin_alike_so_a_prefix_cache_finds_nothing():
    plain, caching = (
        Simulation(scenario=CROWD, costs=COST, config=SchedulerConfig(enable_prefix_caching=is_caching)).run().summary()
        for is_caching in (False, True)
    )
    assert plain == caching


def test_a_step_that_waits_for_its_adapters_takes_longer():
    slow = constant_cost(seconds=0.01, load_s=0.5)
    overlapped = Simulation(scenario=CROWD, costs=slow, policy=PolicyConfig(lora_policy="wait")).run().summary()
    awaited = (
        Simulation(
            scenario=CROWD,
            costs=slow,
            policy=PolicyConfig(lora_policy="wait"),
            lora=LoraConfig(enable_lora_overlap_loading=False),
        )
        .run()
        .summary()
    )

    assert awaited["itl_s"]["max"] >= 0.5 > overlapped["itl_s"]["max"]


def test_a_cost_model_from_a_file_drives_the_clock():
    slow, fast = (
        Simulation(scenario=CROWD, costs=read_cost(name)).run().summary()["e2e_s"]["mean"]
        for name in ("a100-llama8b", "h200-llama8b")
    )
    assert fast < slow


def test_guests_come_are_asked_and_go_while_others_are_served():
    scenario = replace(CROWD, transients=6, transient_every_s=0.5)
    summary = Simulation(scenario=scenario, costs=COST).run().summary(adapter_name)

    assert (summary["requests"], summary["failed"]) == (66, 0)
    assert list(summary["adapters"]) == [f"adapter{number}" for number in range(1, 12)]
    residents = [summary["adapters"][f"adapter{number}"]["ttft_s"]["mean"] for number in range(1, 6)]
    assert summary["fairness"] == jain(residents)


def test_host_memory_holds_what_the_server_would_hold_unless_the_scenario_says_otherwise():
    many = replace(CROWD, slots=2, clients=(replace(CROWD.clients[0], adapters=500),))

    assert lora_config(many).max_loaded_loras == LoraConfig().max_loaded_loras == 128
    assert lora_config(replace(many, max_loaded_loras=6)).max_loaded_loras == 6
    assert lora_config(many, slots=200).max_loaded_loras == 200, "an adapter in a slot is in host memory too"


@pytest.mark.long("two runs of a crowd")
def test_an_adapter_that_left_host_memory_is_read_again():
    many = replace(CROWD, clients=(replace(CROWD.clients[0], adapters=200, requests=400, rate_per_s=40.0),))
    slow = constant_cost(seconds=0.001, load_s=0.002, fetch_s=0.4)
    waits = [
        Simulation(scenario=replace(many, max_loaded_loras=copies), costs=slow).run().summary()["ttft_s"]["p90"]
        for copies in (200, None)
    ]

    assert waits[0] < 0.1 < waits[1]
