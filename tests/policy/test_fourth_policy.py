"""A slot policy that the package knows nothing of is asked for by name, and no file of the package is touched."""

from __future__ import annotations

import pytest

from rota.cli import main
from rota.core.errors import ConfigError
from rota.core.ids import AdapterId
from rota.core.policy_config import PolicyConfig
from rota.llm.config import engine_config
from rota.policy.slot_policies import SLOT_POLICIES
from rota.sim.run import Simulation
from rota.workload.scenario import Client, Scenario
from tests.builders import add_adapter, capacity, submit
from tests.costs import constant_cost
from tests.fakes import FakeDevice
from tests.policy.newest_first import NewestFirst
from tests.scheduler.stage import WAIT, Stage, loads
from tests.worlds import outputs, serve

NEWEST_FIRST = PolicyConfig(lora_policy="newest-first", lora_rotation_quantum_ms=1000.0)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SLOT_POLICIES, "newest-first", NewestFirst.from_config)


def test_the_scheduler_gives_slots_as_it_says():
    stage = Stage(slots=1, policy=NEWEST_FIRST)
    stage.seat(1)
    stage.ask("older", adapter=2, at=0.1)
    stage.ask("newer", adapter=3, at=0.2)

    assert loads(stage.step(at=0.5)) == []
    assert loads(stage.step(at=1.0)) == [3]


def test_answers_are_the_same_as_under_the_policies_of_the_package():
    messages = [(0.0, add_adapter(number)) for number in range(1, 5)]
    messages += [
        (float(turn), submit(f"r{turn}", adapter=AdapterId(turn % 5), max_new_tokens=25, arrived_at=float(turn)))
        for turn in range(12)
    ]
    alone = serve(messages, FakeDevice(capacity(slots=4)), policy=WAIT)

    assert outputs(serve(messages, FakeDevice(capacity(slots=1)), policy=NEWEST_FIRST)) == outputs(alone)


def test_the_simulator_runs_it_and_it_fares_otherwise_than_the_others():
    client = Client(requests=60, rate_per_s=8.0, adapters=5, output_tokens=(1, 80))
    crowd = Scenario(name="crowd", slots=2, clients=(client,))
    policies = [PolicyConfig(lora_policy=name, lora_drain_wait_threshold=0.1) for name in SLOT_POLICIES]
    summaries = [
        Simulation(scenario=crowd, costs=constant_cost(seconds=0.01, load_s=0.002), policy=policy).run().summary()
        for policy in policies
    ]

    assert all((one["requests"], one["failed"]) == (60, 0) for one in summaries)
    assert len({repr(one) for one in summaries}) == len(SLOT_POLICIES)


def test_the_commands_take_its_name(tmp_path, capsys):
    file = tmp_path / "crowd.toml"
    file.write_text("slots = 2\n[[clients]]\nrequests = 20\nrate_per_s = 6.0\nadapters = 4\noutput_tokens = [1, 64]\n")
    with pytest.raises(SystemExit) as end:
        main(["simulate", str(file), "--compare", "wait,newest-first"])
    assert end.value.code == 0
    assert "newest-first" in capsys.readouterr().out

    asked = []
    with pytest.raises(SystemExit):
        main(["serve", "--lora-policy", "newest-first"], serve=lambda engine, _: asked.append(engine.policy))
    assert asked == [PolicyConfig(lora_policy="newest-first")]


def test_it_is_listed_where_a_name_is_wrong():
    with pytest.raises(ConfigError, match="the policies are " + ", ".join(SLOT_POLICIES)):
        engine_config({"lora_policy": "oldest-first"}, quiet=True)
