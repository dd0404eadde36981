"""Steps of the GPU benchmark on a CPU: told apart by what they held, traced beside copies, and fitted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.h200 import fit
from benchmarks.h200.bits import at_most, by_size, main
from benchmarks.h200.shapes import SHAPES
from benchmarks.h200.timed import Step
from benchmarks.h200.traced import Clock, Traced, TracedStep, columns, steps_of
from rota.core.config import SchedulerConfig
from rota.core.ids import AdapterId, Row, Slot
from rota.core.messages import AdapterReady, Message
from rota.core.plan import Chunk, Load, StepPlan, StepResult
from rota.engine.step.frames import mixed_frame
from rota.engine.step.graphs import StepGraphs
from rota.sim.cost import LinearCost, read_cost
from tests.engine.hand import no_graph

# ── in few bits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_part_tells_what_it_found(tmp_path):
    out = tmp_path / "bits.json"
    main(["--shape", "tiny", "--kinds", "bf16", "--slots", "16", "--out", str(out)])
    found = json.loads(out.read_text())["bf16"]

    assert found["steps"]["64 six"]["median"] > 0
    assert found["prompts"]["base"] > 0
    assert set(found["loop"]) == {f"{who}, {way}" for who in ("base", "16") for way in ("as it is", "kernel by kernel")}
    assert found["loop"]["base, as it is"]["0 prompt tokens"]["steps"] > 0


def test_steps_are_told_apart_by_their_prompts():
    def step(prompt_tokens: int, ended_at: float) -> Step:
        return Step(
            decodes=4,
            prompt_tokens=prompt_tokens,
            context_tokens=0,
            adapters=0,
            began_at=0.0,
            ended_at=ended_at,
            submit_s=0.5,
            wait_s=0.0,
        )

    found = by_size([step(0, 1.0), step(0, 3.0), step(1, 5.0), step(512, 7.0), step(513, 9.0)])
    assert {size: told["steps"] for size, told in found.items()} == {
        "0 prompt tokens": 2,
        "512 prompt tokens": 2,
        "1024 prompt tokens": 1,
    }
    assert found["0 prompt tokens"]["seconds"] == pytest.approx(4.0)


def test_large_steps_go_without_a_graph_for_a_while():
    kind = (mixed_frame(decodes=4, prompt_tokens=64), False)
    graphs = StepGraphs([kind], no_graph)
    graphs.capture_next()
    plan = StepPlan(step_id=0, chunks=(Chunk(row=Row(0), start=0, length=40, samples=True),))

    with at_most(39):
        assert graphs.frame_for(plan, has_adapters=False) is None
    with at_most(40):
        assert graphs.frame_for(plan, has_adapters=False) == kind[0]
    assert graphs.frame_for(plan, has_adapters=False) == kind[0]


# ── beside copies ─────────────────────────────────────────────────────────────────────────────────────────────────────


class SlowCopies:
    """A device whose copies end when the test says so."""

    def __init__(self) -> None:
        self.post: Callable[[Message], None] = lambda _: None

    def listen(self, post: Callable[[Message], None]) -> None:
        self.post = post

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        return StepResult(at=0.0)


def test_a_step_counts_copies_of_its_own_adapters_and_of_others():
    device: Any = SlowCopies()
    traced = Traced(device, _clock=Clock(has_gpu=False))
    traced.listen(lambda _: None)
    seats: Any = tuple(SimpleNamespace(row=Row(number), adapter_id=AdapterId(number)) for number in (1, 2))

    def step(number: int, **parts: Any) -> None:
        traced.collect(traced.submit(StepPlan(step_id=number, decodes=(Row(1),), **parts)))

    step(
        1, seats=seats, loads=(Load(adapter_id=AdapterId(1), slot=Slot(0)), Load(adapter_id=AdapterId(2), slot=Slot(1)))
    )
    device.post(AdapterReady(AdapterId(1), at=0.0, copy_s=0.5))
    step(2)
    device.post(AdapterReady(AdapterId(2), at=0.0, copy_s=0.25))
    step(3)
    assert [(step.copies, step.others) for step in traced.trace()] == [(1, 1), (0, 1), (0, 0)]
    assert traced.copy_s == [0.5, 0.25]


# ── the fit of the cost model ─────────────────────────────────────────────────────────────────────────────────────────


def test_steps_and_runs_of_a_tiny_model_are_kept_and_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "sweep", lambda few=fit.sweep()[4:7]: few)  # noqa: B008
    out = tmp_path / "out"
    assert fit.main(["--shape", "tiny", "--folder", str(tmp_path / "assets"), "--out", str(out), "--rest", "0"]) == 0

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
