from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rota.core.ids import BASE
from rota.core.plan import StepPlan, StepResult
from rota.engine.step.frames import mixed_frame


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import mixed_steps

    return mixed_steps


class PaperEngine:
    """Files plans instead of computing them, and holds them to what an engine may expect."""

    def __init__(self, blocks: int) -> None:
        self.plans: list[tuple[StepPlan, bool]] = []  # beside each, whether graphs were there
        self.most_in_flight = 0
        self._blocks = blocks
        self._in_flight = 0
        self._has_graphs = False
        self._owner_of: dict[int, int] = {}

    def capture(self, most_prompt_tokens: int, quiet: bool) -> None:
        """Graphs of decodes; those of steps with prompts come when the engine is idle."""

    def work_while_idle(self) -> bool:
        self._has_graphs = True
        return False

    def submit(self, plan: StepPlan) -> StepPlan:
        for seat in plan.seats:
            for block in seat.blocks:
                assert 0 <= block < self._blocks
                assert self._owner_of.setdefault(block, seat.row) == seat.row, "two rows write to one block"
        assert len(set(plan.sampled_rows)) == len(plan.sampled_rows), "a row is in a step twice"
        self.plans.append((plan, self._has_graphs))
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        self._in_flight -= 1
        return StepResult(at=time.monotonic(), tokens=(0,) * len(ticket.sampled_rows))


def compared(script: ModuleType, cases: list, path: Path | None = None, has_gpu: bool = True) -> tuple:
    rows, pages = 80, script.pages_for(1900)
    author = script.Author(rows, context=300, pages=pages, vocabulary=1000)
    engine, figures = PaperEngine(rows * pages), script.Figures(cases, {"machine": "paper"}, path)
    script.compare(engine, author, 4, figures, has_gpu)
    return engine, figures


def test_each_kind_of_step_is_measured_without_graphs_and_with_them(script):
    case = script.Case(decodes=64, prompt_tokens=100, adapters=6)
    engine, figures = compared(script, [case])

    for has_graphs in (False, True):
        rewound, *steps = [plan for plan, had_graphs in engine.plans if had_graphs == has_graphs]
        assert {(chunk.start, chunk.length) for chunk in rewound.chunks} == {(299, 1)}, "decodes start at 300 again"
        assert {seat.adapter_id for seat in rewound.seats} == {1, 2, 3, 4, 5, 6}
        assert len(steps) == 4 + script.UNCOUNTED
        assert {(len(plan.decodes), plan.chunks[0].length, plan.seats[0].adapter_id) for plan in steps} == {
            (64, 100, 1)
        }
    assert engine.most_in_flight == 2
    assert None not in figures.of_case[case].values()


def test_a_step_that_fits_into_no_frame_has_no_figure_as_a_graph(script):
    small, large = (script.Case(16, prompt_tokens, 0) for prompt_tokens in (1000, 1900))
    engine, figures = compared(script, [large, small])

    assert figures.of_case[large]["as_graph_ms"] is None
    assert figures.of_case[large]["kernel_by_kernel_ms"] is not None
    assert figures.of_case[small]["as_graph_ms"] is not None
    framed = [plan for plan, has_graphs in engine.plans if has_graphs and plan.decodes]
    assert framed
    assert all(mixed_frame(16, 1024).holds(plan) for plan in framed)
    assert "| 1,900 | – / " in compared(script, [script.Case(16, 1900, n) for n in (0, 6)])[1].report(16)


def test_steps_of_the_base_model_take_the_rows_back_from_adapters(script):
    engine, _ = compared(script, [script.Case(64, 16, 6), script.Case(64, 16, 0)], has_gpu=False)

    of_base = engine.plans[len(engine.plans) // 2 :]
    assert {seat.adapter_id for plan, _ in of_base for seat in plan.seats} == {BASE}
    assert {seat.row for seat in of_base[0][0].seats} == set(range(64))


def test_a_run_that_is_cut_short_leaves_what_it_has_measured(script, monkeypatch, tmp_path):
    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PaperEngine, "capture", cut)
    with pytest.raises(KeyboardInterrupt):
        compared(script, [script.Case(0, 16, 0)], tmp_path / "steps.json")

    (step,) = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert step["kernel_by_kernel_ms"] is not None
    assert step["as_graph_ms"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_script_measures_a_tiny_model_on_a_cpu_and_leaves_graphs_out(script, tmp_path, capsys):
    path = tmp_path / "new" / "steps.json"
    flags = ["--decodes", "4", "0", "--prompt-tokens", "250", "1900", "--steps", "3", "--output", str(path)]
    script.main(["--shape", "tiny", *flags])

    found = json.loads(path.read_text())
    kinds = [(step["decodes"], step["prompt_tokens"], step["adapters"]) for step in found["steps"]]
    assert kinds == [(decodes, tokens, count) for decodes in (4, 0) for tokens in (7, 59) for count in (0, 6)]
    for step in found["steps"]:
        assert step["kernel_by_kernel_ms"] > 0.0
        assert step["submit_ms_kernel_by_kernel"] > 0.0
        assert step["as_graph_ms"] is None
        assert step["submit_ms_as_graph"] is None
    assert "--decodes 4 0 --prompt-tokens 250 1900" in found["command"]
    told = capsys.readouterr().out
    assert "No GPU here: steps as graphs are left out." in told
    assert "| 59 | – / " in told
