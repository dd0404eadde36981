"""The GPU benchmark on a CPU, with a tiny model: every part of it runs, so that time on a GPU is not spent on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.h200 import starts
from benchmarks.h200.__main__ import main
from benchmarks.h200.loads import beside_loads
from benchmarks.h200.over_http import scenario_toml
from benchmarks.h200.peers import TARGETS
from benchmarks.h200.runs import all_runs, choose, lengthened, within
from benchmarks.h200.shapes import SHAPES
from benchmarks.h200.timed import Step
from rota.core.errors import ConfigError
from rota.core.events import SlotChanged, SlotState
from rota.core.ids import AdapterId, Slot
from rota.sim.calibrate import read_timings
from rota.sim.cost import read_cost
from rota.workload.scenario import Client, HeavyTail, Scenario, read_scenario


def measure(assets: Path, out: Path, *flags: str) -> int:
    return main(["--shape", "tiny", "--folder", str(assets), "--out", str(out), *flags])


def test_a_run_in_this_process_leaves_results_timings_costs_and_a_report(assets, tmp_path):
    assert measure(assets, tmp_path, "--in-process", "--only", "tail-3-4,cancel-storm,loads,steps-24") == 0

    tail = json.loads((tmp_path / "runs" / "tail-3-4.json").read_text())
    assert tail["via"] == "in-process"
    assert tail["summary"]["requests"] == 10
    assert tail["summary"]["failed"] == 0
    storm = json.loads((tmp_path / "runs" / "cancel-storm.json").read_text())
    assert storm["afterwards"]["requests"] == 6
    assert storm["afterwards"]["failed"] == 0
    assert json.loads((tmp_path / "runs" / "loads.json").read_text())["beside_loads"]["loads"] > 0
    steps = read_timings(tmp_path / "step-timings.json")
    assert any(step.prompt_tokens for step in steps)
    assert any(step.decodes for step in steps)
    assert read_cost(str(tmp_path / "h200-llama8b.toml")).base_s >= 0.0
    report = (tmp_path / "report.md").read_text()
    assert "| tail, 3 slots, 4/s, TTFT median | 1,066 | 243 | ≤ 80.0 | ≤ 50.0 |" in report
    assert "| tail-3-4 | ttft_s median |" in report, "the simulator's error is reported"


def test_a_run_can_be_lengthened_and_lasts_in_proportion():
    (run,) = choose("tail-3-4")
    (client,) = (longer := lengthened(run, 1000)).scenario.clients
    assert (client.requests, longer.lasts_s / run.lasts_s) == (1000, 1000 / run.scenario.clients[0].requests)


@pytest.mark.long("starts a server")
def test_a_run_over_http_starts_a_server_and_stops_it(assets, tmp_path):
    assert measure(assets, tmp_path, "--only", "isolation") == 0

    found = json.loads((tmp_path / "runs" / "isolation.json").read_text())
    assert found["via"] == "http"
    assert found["summary"]["failed"] == 0
    assert found["problems"] == {}
    assert found["summary"]["base"]["requests"] == found["summary"]["tuned"]["requests"] == 4
    start = json.loads((tmp_path / "start-http-isolation-alone.json").read_text())
    assert start["start_s"] > 0.0
    assert start["peak_rss_gb"] > 0.05


@pytest.mark.long("starts a server, and its engine again")
def test_starts_are_measured_and_so_is_the_end_of_an_engine(assets, tmp_path):
    starts.main(
        [
            "--shape",
            "tiny",
            "--folder",
            str(assets),
            "--out",
            str(tmp_path),
            "--adapters",
            "3",
            "--rounds",
            "1",
            "--serves",
            "0",
        ]
    )

    (found,) = json.loads((tmp_path / "starts.json").read_text())["starts"]
    assert found["adapters"] == 3
    assert 0 < found["ready_s"] < found["first_answer_s"]
    assert found["answers_again_s"] > 0.1, "an engine takes longer to start again than to answer"


def test_a_server_that_does_not_start_is_a_failure_that_is_told(assets, tmp_path, capsys):
    assert measure(assets, tmp_path, "--only", "closed-base", "--set", "prot=1") == 1

    assert "prot is not an option; did you mean port?" in capsys.readouterr().out


def test_with_little_time_the_most_important_runs_stay():
    runs = all_runs()

    assert within(runs, 10_000.0, in_process=False) == runs
    assert [run.name for run in within(runs, 130.0, in_process=False)] == ["tail-3-4", "tail-3-10"]


def test_a_run_nobody_knows_is_refused_by_name():
    with pytest.raises(ConfigError, match="There is no run 'tale'; the runs are tail-3-4"):
        choose("closed,tale")


def test_every_scenario_survives_the_way_through_a_file(tmp_path):
    for run in all_runs():
        path = tmp_path / "scenario.toml"
        path.write_text(scenario_toml(run.scenario))
        assert read_scenario(path) == run.scenario


def test_lengths_with_a_heavy_tail_survive_it_too_and_fit_a_smaller_model(tmp_path):
    client = Client(requests=20, rate_per_s=4.0, output_tokens=HeavyTail(median=64, p99=640))
    heavy = Scenario(name="heavy", clients=(client,))
    path = tmp_path / "scenario.toml"
    path.write_text(scenario_toml(heavy))

    assert read_scenario(path) == heavy
    (fitted,) = SHAPES["tiny"].fit(heavy).clients
    assert fitted.output_tokens == HeavyTail(median=2, p99=20)


def test_every_target_names_a_run_there_is():
    assert {target.run for target in TARGETS} <= {run.name for run in all_runs()}


def test_a_rate_is_better_when_higher_and_a_time_when_lower():
    rate, time = TARGETS[0], TARGETS[3]

    assert [rate.verdict(value) for value in (8500, 7000, 5000)] == ["aim", "must", "MISSED"]
    assert [time.verdict(value) for value in (5.0, 6.0, 7.0)] == ["aim", "must", "MISSED"]


def test_steps_beside_a_load_are_told_apart_from_others():
    def step(begin: float, end: float) -> Step:
        return Step(8, 0, 100, 0, begin, end, submit_s=0.0, wait_s=0.0)

    slot, adapter = Slot(0), AdapterId(1)
    events = [
        SlotChanged(at=2.2, slot=slot, adapter_id=adapter, state=SlotState.LOADING),
        SlotChanged(at=2.4, slot=slot, adapter_id=adapter, state=SlotState.READY),
    ]
    found = beside_loads([step(0.0, 1.0), step(1.0, 2.0), step(2.0, 3.5), step(3.5, 4.5)], events)

    assert found["loads"] == 1
    assert found["steps beside loads"] == 1
    assert found["other steps"] == 2
    assert found["longest beside / median otherwise"] == 1.5
