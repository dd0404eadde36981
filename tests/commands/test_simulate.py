from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rota.cli import main
from rota.commands.simulate import SIMULATE_CONFIGS, label, policies_of
from rota.core.errors import ConfigError
from rota.core.options import options_of
from rota.core.policy_config import PolicyConfig

SCENARIOS = Path(__file__).parents[2] / "benchmarks/scenarios"
FIGURES = {"mean", "median", "p90", "p95", "p99", "max"}
SPREADS = {"ttft_s", "e2e_s", "tpot_s", "itl_s", "gap_s"}


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    file = tmp_path / "small.toml"
    client = "requests = 30\nrate_per_s = 6.0\nadapters = 4\noutput_tokens = [1, 64]\nbase_share = 0.2\n"
    file.write_text(f"slots = 2\n[[clients]]\n{client}")
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
    assert "wait" in shown and "drain (2 s)" in shown and "rotate" in shown
    policies = json.loads(file.read_text())["policies"]
    assert list(policies) == ["wait", "drain", "rotate"]
    for summary in policies.values():
        assert_is_summary(summary)


def test_flags_reach_the_scheduler(scenario, tmp_path):
    file = tmp_path / "numbers.json"
    assert simulate(scenario, "--max-queued-requests", "1", "--max-running-requests", "1", "--json", str(file)) == 0

    assert json.loads(file.read_text())["failed"] > 0


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
        (["SCENARIO", "--compare", "wait,hope"], "'hope' is not a policy"),
        (["SCENARIO", "--cost", "b300"], "There is no cost model 'b300'"),
        (["SCENARIO", "--seeds", "0"], "seeds must be at least 1"),
        (["SCENARIO", "--journal", "j", "--seeds", "2"], "journal follows a single run"),
        (["SCENARIO", "--json", "/nowhere/at/all.json"], "There is no folder /nowhere/at"),
        (["SCENARIO", "--plot", "picture.xyz"], "Cannot write the plot"),
        (["SCENARIO", "--chunked-prefill-size", "1"], "chunked_prefill_size is 1"),
        (["SCENARIO", "--compare", "drain", "--lora-drain-wait-threshold", "0"], "of 0 turns draining off"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_code_2(scenario, capsys, arguments, words):
    assert simulate(*[scenario if one == "SCENARIO" else one for one in arguments]) == 2
    assert words in capsys.readouterr().err


def test_drain_without_a_threshold_drains_after_two_seconds_and_the_label_says_so():
    policy = policies_of("drain", PolicyConfig())["drain"]

    assert label(policy) == "drain (2 s)"
    assert policies_of(None, PolicyConfig(lora_policy="wait")) == {"wait": PolicyConfig(lora_policy="wait")}
    with pytest.raises(ConfigError, match="the policies are rotate, drain, wait"):
        policies_of("wait,", PolicyConfig())


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_scenario_can_be_read(file):
    from rota.workload.scenario import read_scenario

    assert read_scenario(file).about


def test_simulating_loads_neither_torch_nor_matplotlib():
    program = (
        "import sys, rota.commands.simulate, rota.sim.run; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
