"""The fit of the cost model on a CPU, with a tiny model and with made-up steps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.h200 import fit
from benchmarks.h200.shapes import SHAPES
from benchmarks.h200.traced import TracedStep, columns, steps_of
from rota.core.config import SchedulerConfig
from rota.sim.cost import LinearCost, read_cost


def test_steps_and_runs_of_a_tiny_model_are_kept_and_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "sweep", lambda few=fit.sweep()[4:7]: few)  # noqa: B008
    out = tmp_path / "out"
    assert fit.main(["--shape", "tiny", "--folder", str(tmp_path / "assets"), "--out", str(out)]) == 0

    kept = steps_of(json.loads((out / "steps" / "tail-3-4.json").read_text())["steps"])
    assert len(kept) > 20
    assert all(step.step_s > 0.0 and step.told_s > 0.0 for step in kept)
    copies = json.loads((out / "steps" / "tail-3-4.json").read_text())["copies"]
    assert copies["median"] > 0.0, "six adapters on three slots are copied"
    report = (out / "report.md").read_text()
    assert "| tail-3-10 | e2e_s mean |" in report
    assert read_cost(str(out / "h200-llama8b.toml")).graphs is not None
    assert fit.main(["--again", str(out)]) == 0, "what is in the folder can be fitted again without a device"


def machine() -> LinearCost:
    """A made-up machine that pads its steps."""
    graphs = fit.graphs_of(SchedulerConfig())
    curve = tuple(2e-5 * max(0, knot - 128) for knot in graphs.knots)
    graphs = replace(graphs, knots_s=curve, lora_token_s=1e-6, eager_s=0.003)
    return replace(
        read_cost("h200-llama8b"), base_s=0.005, sequence_s=0.0, prompt_token_s=0.0, context_token_s=1e-8, graphs=graphs
    )


def steps_on(cost: LinearCost, count: int, seed: int) -> list[TracedStep]:
    dice, made = random.Random(seed), []
    for number in range(count):
        decodes, prompt_tokens = dice.randint(1, 250), dice.choice([0, 0, dice.randint(1, 1700)])
        context, adapters, copies = (
            decodes * dice.randint(1, 500) + prompt_tokens,
            dice.randint(0, 16),
            number % 10 == 9,
        )
        step_s = cost.seconds(decodes, prompt_tokens, context, adapters) * dice.uniform(0.98, 1.02) + copies * 0.05
        counts = (decodes, prompt_tokens, context, adapters, prompt_tokens > 0, 0, copies, 0, True)
        made.append(TracedStep(*counts, submit_s=0.001, step_s=step_s, idle_s=0.0, told_s=0.0))
    return made


def test_the_model_is_fitted_to_the_sweep_and_judged_by_other_steps(tmp_path: Path):
    truth = machine()
    (tmp_path / "steps").mkdir()
    for name, seed in (("sweep-1", 1), ("tail-3-4", 2)):
        kept = {"copies": {"median": 2.0}, "steps": columns(steps_on(truth, 1500, seed))}
        (tmp_path / "steps" / f"{name}.json").write_text(json.dumps(kept))
    report = fit.analyse(tmp_path)
    found = read_cost(str(tmp_path / "h200-llama8b.toml"))

    (line,) = [line for line in report.splitlines() if line.startswith("| tail-3-4 | all |")]
    _, _, _, number, median, p95, total, _ = line.split("|")
    assert number.strip() == "1,350", "steps that may have waited for a copy judge nothing"
    assert float(median.strip(" %")) < 1.5
    assert float(p95.strip(" %")) < 4.0
    assert abs(float(total.strip(" %"))) < 1.0
    assert found.load_s == pytest.approx(0.002)
    assert found.seconds(8, 700, 1000, 2) == pytest.approx(truth.seconds(8, 700, 1000, 2), rel=0.03)


def test_a_front_end_adds_what_the_median_first_token_has_more_over_http():
    def result(median_s: float) -> dict[str, object]:
        return {"summary": {"ttft_s": {"median": median_s}}}

    results = {"tail-3-4": result(0.02), "tail-3-4-http": result(0.023), "tail-3-10": result(0.02)}
    assert fit.front_s(results) == pytest.approx(0.003)
    assert fit.front_s({"tail-3-4": result(0.02)}) == 0.0


def test_every_scenario_of_the_sweep_fits_the_tiny_model_too():
    longest = SHAPES["tiny"].config["max_position_embeddings"]
    assert all(SHAPES["tiny"].fit(scenario).longest < longest for scenario in fit.sweep())
