"""The benchmarks of steps with prompts write plans that an engine may expect."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rota.core.config import EngineConfig
from rota.core.ids import BASE, Row
from rota.core.plan import StepPlan, StepResult
from rota.engine.step.device_step import DeviceStep
from rota.engine.step.frames import mixed_frame

# ── long steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

LENGTHS = [1, 16, 17, 600]


@pytest.fixture
def long_steps() -> ModuleType:
    return importlib.import_module("long_steps")


@pytest.fixture
def seated(long_steps) -> list[StepPlan]:
    return list(long_steps.Author(LENGTHS).seated())


class PaperEngine:
    """Files plans instead of computing them."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        return plan

    def collect(self, ticket: StepPlan) -> None:
        pass


def test_every_row_is_seated_at_its_length(seated):
    seats = [seat for plan in seated for seat in plan.seats]

    assert [(seat.row, len(seat.tokens), seat.prompt_length) for seat in seats] == [
        (row, length, length) for row, length in enumerate(LENGTHS)
    ]


def test_every_row_s_last_token_is_computed_once(seated):
    chunks = [chunk for plan in seated for chunk in plan.chunks]

    assert [(chunk.row, chunk.start + chunk.length, chunk.samples) for chunk in chunks] == [
        (row, length, True) for row, length in enumerate(LENGTHS)
    ]
    assert {chunk.length for chunk in chunks} == {1}


def test_no_block_is_two_rows_and_every_row_has_room_for_all_its_steps(long_steps, seated):
    seats = [seat for plan in seated for seat in plan.seats]
    uses = Counter(block for seat in seats for block in seat.blocks)

    assert set(uses.values()) == {1}
    for seat in seats:
        steps = long_steps.COUNTED + long_steps.SETTLING + 1
        assert len(seat.blocks) * long_steps.BLOCK_SIZE >= len(seat.tokens) + steps


def test_the_blocks_of_every_case_are_there(long_steps):
    for lengths in long_steps.STEPS.values():
        used = sum(len(plan.seats[0].blocks) for plan in long_steps.Author(lengths).seated())
        assert len(lengths) <= long_steps.ROWS
        assert used <= long_steps.block_count()


def test_a_decode_takes_every_row_once(long_steps):
    plan = long_steps.Author(LENGTHS).decode(7, len(LENGTHS))

    assert plan.step_id == 7
    assert plan.decodes == tuple(Row(row) for row in range(len(LENGTHS)))
    assert not plan.seats
    assert not plan.chunks


def test_a_chunk_stands_beside_48_decodes_and_on_blocks_of_its_own(long_steps, monkeypatch):
    driven: list[StepPlan] = []
    monkeypatch.setattr(long_steps, "drive", lambda _, plans: driven.extend(plans))
    engine = PaperEngine()
    long_steps.chunk_ms(engine, 32, 100_000)

    uses = Counter(block for plan in engine.plans for seat in plan.seats for block in seat.blocks)
    assert set(uses.values()) == {1}
    assert max(uses) < long_steps.block_count()
    assert {(len(plan.decodes), plan.chunks[0].start, plan.chunks[0].length) for plan in driven} == {(48, 100_000, 32)}


def test_another_checkout_s_attention_is_loaded_beside_ours_and_finds_what_it_asks_of_a_step(monkeypatch):
    monkeypatch.setattr(DeviceStep, "longest_decode", 0, raising=False)  # so that it is gone afterwards
    long_rows, name = importlib.import_module("long_rows"), "rota.engine.attention.triton_attention"
    ours = importlib.import_module(name)
    other = long_rows.base_attention(Path(__file__).parents[2])

    assert other is not ours
    assert importlib.import_module(name) is ours
    assert DeviceStep.longest_decode == long_rows.LONGEST


def test_an_engine_is_asked_for_with_room_for_the_largest_step(long_steps, monkeypatch, tmp_path):
    configs = []

    def build(config: EngineConfig) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(_cache=SimpleNamespace(layers=[]))

    monkeypatch.setattr(long_steps, "make_model", lambda folder, _: folder)
    monkeypatch.setattr(long_steps, "build_engine", build)
    long_steps.start(tmp_path)

    (config,) = configs
    assert config.model.model_path == str(tmp_path / "model")
    assert config.cache.kv_blocks == long_steps.block_count()
    assert config.scheduler.max_running_requests == long_steps.ROWS


# ── mixed steps ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mixed_steps() -> ModuleType:
    import mixed_steps

    return mixed_steps


class StrictPaperEngine:
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


def compared(mixed_steps: ModuleType, cases: list, path: Path | None = None, has_gpu: bool = True) -> tuple:
    rows, pages = 80, mixed_steps.pages_for(1900)
    author = mixed_steps.Author(rows, context=300, pages=pages, vocabulary=1000)
    engine, figures = StrictPaperEngine(rows * pages), mixed_steps.Figures(cases, {"machine": "paper"}, path)
    mixed_steps.compare(engine, author, 4, figures, has_gpu)
    return engine, figures


def test_each_kind_of_step_is_measured_without_graphs_and_with_them(mixed_steps):
    case = mixed_steps.Case(decodes=64, prompt_tokens=100, adapters=6)
    engine, figures = compared(mixed_steps, [case])

    for has_graphs in (False, True):
        rewound, *steps = [plan for plan, had_graphs in engine.plans if had_graphs == has_graphs]
        assert {(chunk.start, chunk.length) for chunk in rewound.chunks} == {(299, 1)}, "decodes start at 300 again"
        assert {seat.adapter_id for seat in rewound.seats} == {1, 2, 3, 4, 5, 6}
        assert len(steps) == 4 + mixed_steps.UNCOUNTED
        assert {(len(plan.decodes), plan.chunks[0].length, plan.seats[0].adapter_id) for plan in steps} == {
            (64, 100, 1)
        }
    assert engine.most_in_flight == 2
    assert None not in figures.of_case[case].values()


def test_a_step_that_fits_into_no_frame_has_no_figure_as_a_graph(mixed_steps):
    small, large = (mixed_steps.Case(16, prompt_tokens, 0) for prompt_tokens in (1000, 1900))
    engine, figures = compared(mixed_steps, [large, small])

    assert figures.of_case[large]["as_graph_ms"] is None
    assert figures.of_case[large]["kernel_by_kernel_ms"] is not None
    assert figures.of_case[small]["as_graph_ms"] is not None
    framed = [plan for plan, has_graphs in engine.plans if has_graphs and plan.decodes]
    assert framed
    assert all(mixed_frame(16, 1024).holds(plan) for plan in framed)
    assert "| 1,900 | – / " in compared(mixed_steps, [mixed_steps.Case(16, 1900, n) for n in (0, 6)])[1].report(16)


def test_steps_of_the_base_model_take_the_rows_back_from_adapters(mixed_steps):
    engine, _ = compared(mixed_steps, [mixed_steps.Case(64, 16, 6), mixed_steps.Case(64, 16, 0)], has_gpu=False)

    of_base = engine.plans[len(engine.plans) // 2 :]
    assert {seat.adapter_id for plan, _ in of_base for seat in plan.seats} == {BASE}
    assert {seat.row for seat in of_base[0][0].seats} == set(range(64))


def test_a_run_that_is_cut_short_leaves_what_it_has_measured(mixed_steps, monkeypatch, tmp_path):
    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StrictPaperEngine, "capture", cut)
    with pytest.raises(KeyboardInterrupt):
        compared(mixed_steps, [mixed_steps.Case(0, 16, 0)], tmp_path / "steps.json")

    (step,) = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert step["kernel_by_kernel_ms"] is not None
    assert step["as_graph_ms"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_script_measures_a_tiny_model_on_a_cpu_and_leaves_graphs_out(mixed_steps, tmp_path, capsys):
    path = tmp_path / "new" / "steps.json"
    flags = ["--decodes", "4", "0", "--prompt-tokens", "250", "1900", "--steps", "3", "--output", str(path)]
    mixed_steps.main(["--shape", "tiny", *flags])

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
