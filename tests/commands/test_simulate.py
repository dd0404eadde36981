from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rota.cli import main
from rota.commands.simulate import SIMULATE_CONFIGS, SimulateConfig, variants_of
from rota.core.errors import ConfigError
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig
from rota.sim.cost import LinearCost
from tests.engine.terminal import Terminal
from tests.processes import run_program

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
FIGURES = {"mean", "median", "p90", "p95", "p99", "max"}
SPREADS = {"ttft_s", "e2e_s", "tpot_s", "itl_s", "gap_s", "stall_s"}


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    client = "requests = 30\nrate_per_s = 6.0\nadapters = 4\noutput_tokens = [1, 64]\nbase_share = 0.2\n"
    file.write_text(f"slots = 2\n[[clients]]\n{client}")
    return str(file)


@pytest.fixture
def hot_and_cold(tmp_path: Path) -> str:
    """One adapter of four is asked for most often, and now and then somebody else wants one of two slots."""
    file = tmp_path / "hot.toml"
    client = 'requests = 60\nrate_per_s = 1.0\nadapters = 4\ndistribution = "skewed"\nskew = 3.0\n'
    file.write_text(f"slots = 2\n[[clients]]\noutput_tokens = [1, 16]\n{client}")
    return str(file)


def simulate(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    return end.value.code


def assert_is_summary(summary: dict[str, object]) -> None:
    assert {"requests", "failed", "duration_s", "output_tokens_per_s", *SPREADS} <= summary.keys()
    for name in SPREADS:
        assert summary[name].keys() == FIGURES  # type: ignore[attr-defined]


def test_every_policy_and_scheduler_option_is_a_flag(capsys):
    assert simulate("--help") == 0
    shown = capsys.readouterr().out
    for name in options_of(*SIMULATE_CONFIGS):
        assert f"--{name.replace('_', '-')}" in shown


def test_a_run_prints_a_table_and_writes_one_summary(scenario, tmp_path, capsys):
    file = tmp_path / "numbers.json"
    assert simulate(scenario, "--json", str(file)) == 0

    assert "rotate" in capsys.readouterr().out
    summary = json.loads(file.read_text())
    assert_is_summary(summary)
    assert summary["requests"] == 30
    assert set(summary["adapters"]) == {"base", "adapter1", "adapter2", "adapter3", "adapter4"}
    for adapter in summary["adapters"].values():
        assert_is_summary(adapter)


def test_a_comparison_has_a_line_and_a_summary_for_each_policy(scenario, tmp_path, capsys):
    file = tmp_path / "numbers.json"
    assert simulate(scenario, "--compare", "wait,drain,rotate", "--seeds", "2", "--json", str(file)) == 0

    shown = capsys.readouterr().out
    assert "wait" in shown
    assert "drain (2 s)" in shown
    assert "rotate" in shown
    policies = json.loads(file.read_text())["policies"]
    assert list(policies) == ["wait", "drain", "rotate"]
    for summary in policies.values():
        assert_is_summary(summary)


def test_a_simulation_says_of_each_policy_whether_slots_are_too_few(tmp_path, capsys):
    client = "requests = 80\nrate_per_s = 4.0\nadapters = 6\noutput_tokens = [200, 400]\n"
    file = tmp_path / "crowd.toml"
    file.write_text(f"[[clients]]\n{client}")

    assert simulate(str(file), "--slots", "2", "--compare", "wait,rotate", "--quiet") == 0
    assert "\nwait: More adapters are busy than there are slots: " in capsys.readouterr().out
    assert simulate(str(file), "--slots", "6", "--quiet") == 0
    assert "More adapters are busy" not in capsys.readouterr().out


def test_routers_have_a_line_and_a_summary_each_and_replicas_on_request(scenario, tmp_path, capsys):
    file, flags = tmp_path / "numbers.json", ("--replicas", "2", "--routers", "adapters,round-robin")
    assert simulate(scenario, *flags, "--json", str(file)) == 0

    shown = capsys.readouterr().out
    assert "round-robin" in shown
    assert "loads" in shown
    assert "replica 1" not in shown
    routers = json.loads(file.read_text())["routers"]
    assert list(routers) == ["adapters", "round-robin"]
    for summary in routers.values():
        assert_is_summary(summary)
        assert list(summary["replicas"]) == ["replica 0", "replica 1"]
        assert sum(part["requests"] for part in summary["replicas"].values()) == summary["requests"] == 30
    assert routers["round-robin"]["routed"] == {"requests go to the replicas in turn": 30}
    assert simulate(scenario, *flags, "--per-replica") == 0
    assert "round-robin, by replica" in capsys.readouterr().out


def test_a_journal_of_several_replicas_says_which_engine_each_event_is_of(scenario, tmp_path):
    file = tmp_path / "events.jsonl"
    assert simulate(scenario, "--replicas", "3", "--journal", str(file)) == 0

    events = [json.loads(line) for line in file.read_text().splitlines()]
    for kind in ("produced", "slot_changed", "host_changed"):
        assert {one["engine_id"] for one in events if one["event"] == kind} == {0, 1, 2}, kind
    assert sum(one["event"] == "finished" for one in events) == 30


def test_one_replica_is_what_it_was_and_has_nothing_of_routers(scenario, tmp_path):
    alone, told = (numbers(tmp_path, scenario, *flags) for flags in ([], ["--replicas", "1"]))

    assert alone == told
    assert not {"replicas", "routed", "loads"} & alone.keys()


def test_flags_reach_the_scheduler(scenario, tmp_path):
    file = tmp_path / "numbers.json"
    assert simulate(scenario, "--max-queued-requests", "1", "--max-running-requests", "1", "--json", str(file)) == 0

    summary = json.loads(file.read_text())
    assert summary["failures"] == {"queue_full": summary["failed"]}
    assert summary["failed"] > 0


def numbers(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a run gives."""
    file = folder / "numbers.json"
    assert simulate(*arguments, "--json", str(file)) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_slots_may_be_called_as_they_are_when_serving(scenario, tmp_path):
    as_the_scenario_says = numbers(tmp_path, scenario)
    by_name, by_the_other = (numbers(tmp_path, scenario, flag, "1") for flag in ("--slots", "--max-loras-per-batch"))

    assert by_name == by_the_other != as_the_scenario_says
    assert numbers(tmp_path, scenario, "--max-loras-per-batch", "auto") == as_the_scenario_says


def test_an_adapter_that_host_memory_has_no_room_for_is_read_again(hot_and_cold, tmp_path):
    all_fit, two_fit = (numbers(tmp_path, hot_and_cold, *flags) for flags in ([], ["--max-loaded-loras", "2"]))

    assert all_fit["ttft_s"]["max"] < 0.1 < two_fit["ttft_s"]["max"]  # a read takes 0.1 s


def test_the_eviction_policy_says_whether_a_popular_adapter_keeps_its_place(hot_and_cold, tmp_path):
    file = tmp_path / "events.jsonl"
    loads = {}
    for policy in ("lru", "fifo"):
        assert simulate(hot_and_cold, "--lora-eviction-policy", policy, "--journal", str(file)) == 0
        events = [json.loads(line) for line in file.read_text().splitlines()]
        loads[policy] = sum(one.get("state") == "loading" and one["adapter_id"] == 1 for one in events)

    assert loads["lru"] < loads["fifo"]


def test_without_overlap_loading_answers_pause_for_the_copy_of_an_adapter(scenario, tmp_path):
    cost = tmp_path / "slow.toml"
    free = {name: 0.0 for name in LinearCost.__slots__ if name not in ("name", "prefill", "graphs")}
    cost.write_text("\n".join(f"{name} = {value}" for name, value in {**free, "base_s": 0.01, "load_s": 0.5}.items()))
    flags = ("--cost", str(cost), "--lora-policy", "wait")
    beside, awaited = (
        numbers(tmp_path, scenario, *flags, f"--{no}enable-lora-overlap-loading")["itl_s"]["max"] for no in ("", "no-")
    )

    assert beside < 0.5 <= awaited


@pytest.mark.parametrize("flag", ["--lora-paths", "--max-lora-rank", "--lora-backend", "--adapter-root"])
def test_flags_about_weights_are_not_offered(scenario, capsys, flag):
    assert simulate(scenario, flag, "1") == 2
    assert f"No such option: {flag}" in capsys.readouterr().err


def test_a_config_file_takes_the_same_names_and_flags_go_before_it(scenario, tmp_path):
    file = tmp_path / "rota.toml"
    file.write_text('lora-policy = "wait"\nslots = 1\nseed = 3\nmax_running_requests = 2\n')

    by_file = numbers(tmp_path, scenario, "--config", str(file), "--seed", "4")
    by_flags = ("--lora-policy", "wait", "--slots", "1", "--seed", "4", "--max-running-requests", "2")
    assert by_file == numbers(tmp_path, scenario, *by_flags)


def test_a_terminal_sees_how_far_a_run_has_come_unless_told_otherwise(scenario, tmp_path, monkeypatch):
    file = tmp_path / "rota.toml"
    file.write_text("quiet = true\n")
    terminal, still = Terminal(), Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert simulate(scenario) == 0
    monkeypatch.setattr("sys.stderr", still)
    assert simulate(scenario, "--quiet") == simulate(scenario, "--config", str(file)) == 0

    assert "Simulating:   0%" in terminal.getvalue()
    assert "/30" in terminal.getvalue()
    assert still.getvalue() == ""


def test_adapters_are_printed_on_request_with_every_kind_of_time(scenario, capsys):
    assert simulate(scenario, "--per-adapter") == 0
    lines = capsys.readouterr().out.splitlines()

    assert sum("adapter4" in line.split() for line in lines) == 1 + len(SPREADS)


def test_a_journal_has_every_request_from_its_asking_to_its_end(scenario, tmp_path):
    file = tmp_path / "events.jsonl"
    assert simulate(scenario, "--journal", str(file)) == 0

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for event in ("asked", "admitted", "finished"):
        assert sum(line["event"] == event for line in lines) == 30
    assert [line["at"] for line in lines if line["event"] == "asked"] == sorted(
        line["at"] for line in lines if line["event"] == "asked"
    )


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_a_picture(scenario, tmp_path, ending):
    file = tmp_path / f"picture.{ending}"
    assert simulate(scenario, "--compare", "wait,rotate", "--plot", str(file)) == 0

    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_without_matplotlib_a_plot_is_refused_before_anything_is_simulated(scenario, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python takes for a module that is not there
    monkeypatch.setattr("rota.commands.simulate.Simulation", lambda *_: pytest.fail("it simulated"))

    assert simulate(scenario, "--plot", str(tmp_path / "picture.png")) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_calibration_writes_a_cost_model_that_a_simulation_takes(scenario, tmp_path, capsys):
    timings = tmp_path / "timings.json"
    steps = [
        {"decodes": n, "prompt_tokens": 0, "context_tokens": 100 * n, "adapters": 1, "seconds": 0.01 + 1e-5 * n}
        for n in range(1, 50)
    ]
    timings.write_text(json.dumps(steps))

    assert simulate("--calibrate", str(timings)) == 0
    assert "off by 0.0% (median)" in capsys.readouterr().out
    assert simulate(scenario, "--cost", str(tmp_path / "timings.toml")) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Name a scenario file"),
        (["/nowhere.toml"], "There is no scenario file /nowhere.toml"),
        (["SCENARIO", "--compare", "wait,hope"], "compare: 'hope' is not a policy"),
        (["SCENARIO", "--lora-policy", "hope"], "lora_policy: 'hope' is not a policy; the policies are rotate,"),
        (["SCENARIO", "--cost", "b300"], "There is no cost model 'b300'"),
        (["SCENARIO", "--seeds", "0"], "seeds must be at least 1"),
        (["SCENARIO", "--replicas", "0"], "replicas must be at least 1"),
        (["SCENARIO", "--replicas", "6", "--fronts", "4"], "fronts must divide replicas: 4 cannot share 6 evenly"),
        ([str(SCENARIOS / "churn.toml"), "--adds-on-demand"], "not for scenarios with transients"),
        (["SCENARIO", "--routers", "adapters"], "routers needs replicas of at least 2"),
        (["SCENARIO", "--replicas", "2", "--routers", "random"], "There is no router 'random'; known are adapters,"),
        (["SCENARIO", "--replicas", "2", "--routers", "adapters", "--compare", "wait"], "give one of them"),
        (["SCENARIO", "--replicas", "2", "--routers", "adapters,round-robin", "--journal", "j"], "a single run"),
        (["SCENARIO", "--journal", "j", "--seeds", "2"], "journal follows a single run"),
        (["SCENARIO", "--json", "/nowhere/at/all.json"], "There is no folder /nowhere/at"),
        (["SCENARIO", "--plot", "picture.xyz"], "Cannot write the plot"),
        (["SCENARIO", "--chunked-prefill-size", "1"], "chunked_prefill_size is 1"),
        (["SCENARIO", "--slots", "2", "--max-loras-per-batch", "3"], "they are the same thing; give one of them"),
        (["SCENARIO", "--max-loras-per-batch", "-1"], "max_loras_per_batch must not be below 0"),
        (["SCENARIO", "--max-loaded-loras", "1"], "max_loaded_loras is 1, fewer than max_loras_per_batch (2)"),
        (["SCENARIO", "--config", "/nowhere.toml"], "Cannot read /nowhere.toml"),
        (["SCENARIO", "--compare", "drain", "--lora-drain-wait-threshold", "0"], "of 0 turns draining off"),
        (["SCENARIO", "--lora-policy", "wait", "--lora-drain-wait-threshold", "2"], "'wait' does not read it"),
        (["SCENARIO", "--compare", "wait,rotate", "--lora-drain-wait-threshold", "2"], "(wait, rotate) reads it"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_code_2(scenario, capsys, arguments, words):
    assert simulate(*[scenario if one == "SCENARIO" else one for one in arguments]) == 2
    assert words in capsys.readouterr().err


def test_drain_without_a_threshold_drains_after_two_seconds_and_the_label_says_so():
    (compared,) = variants_of(SimulateConfig(compare="drain"), PolicyConfig())
    (alone,) = variants_of(SimulateConfig(), PolicyConfig(lora_policy="wait"))

    assert (compared.name, compared.label) == ("drain", "drain (2 s)")
    assert (alone.name, alone.policy) == ("wait", PolicyConfig(lora_policy="wait"))
    with pytest.raises(ConfigError, match="the policies are rotate, drain, wait"):
        variants_of(SimulateConfig(compare="wait,"), PolicyConfig())


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_scenario_can_be_read(file):
    from rota.workload.scenario import read_scenario

    assert read_scenario(file).about


def test_simulating_loads_neither_torch_nor_matplotlib():
    program = (
        "import sys, rota.commands.simulate, rota.sim.run; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    run_program([sys.executable, "-c", program])
