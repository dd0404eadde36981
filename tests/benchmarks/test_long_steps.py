from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rota.core.config import EngineConfig
from rota.core.ids import Row
from rota.core.plan import StepPlan
from rota.engine.step.device_step import DeviceStep

LENGTHS = [1, 16, 17, 600]


@pytest.fixture
def load(monkeypatch):
    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return load


@pytest.fixture
def script(load) -> ModuleType:
    return load("long_steps")


@pytest.fixture
def seated(script) -> list[StepPlan]:
    return list(script.Author(LENGTHS).seated())


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


def test_no_block_is_two_rows_and_every_row_has_room_for_all_its_steps(script, seated):
    seats = [seat for plan in seated for seat in plan.seats]
    uses = Counter(block for seat in seats for block in seat.blocks)

    assert set(uses.values()) == {1}
    for seat in seats:
        steps = script.COUNTED + script.SETTLING + 1
        assert len(seat.blocks) * script.BLOCK_SIZE >= len(seat.tokens) + steps


def test_the_blocks_of_every_case_are_there(script):
    for lengths in script.STEPS.values():
        used = sum(len(plan.seats[0].blocks) for plan in script.Author(lengths).seated())
        assert len(lengths) <= script.ROWS
        assert used <= script.block_count()


def test_a_decode_takes_every_row_once(script):
    plan = script.Author(LENGTHS).decode(7, len(LENGTHS))

    assert plan.step_id == 7
    assert plan.decodes == tuple(Row(row) for row in range(len(LENGTHS)))
    assert not plan.seats
    assert not plan.chunks


def test_a_chunk_stands_beside_48_decodes_and_on_blocks_of_its_own(script, monkeypatch):
    driven: list[StepPlan] = []
    monkeypatch.setattr(script, "drive", lambda _, plans: driven.extend(plans))
    engine = PaperEngine()
    script.chunk_ms(engine, 32, 100_000)

    uses = Counter(block for plan in engine.plans for seat in plan.seats for block in seat.blocks)
    assert set(uses.values()) == {1}
    assert max(uses) < script.block_count()
    assert {(len(plan.decodes), plan.chunks[0].start, plan.chunks[0].length) for plan in driven} == {(48, 100_000, 32)}


def test_another_checkout_s_attention_is_loaded_beside_ours_and_finds_what_it_asks_of_a_step(load, monkeypatch):
    monkeypatch.setattr(DeviceStep, "longest_decode", 0, raising=False)  # so that it is gone afterwards
    long_rows, name = load("long_rows"), "rota.engine.attention.triton_attention"
    ours = importlib.import_module(name)
    other = long_rows.base_attention(Path(__file__).parents[2])

    assert other is not ours
    assert importlib.import_module(name) is ours
    assert DeviceStep.longest_decode == long_rows.LONGEST


def test_an_engine_is_asked_for_with_room_for_the_largest_step(script, monkeypatch, tmp_path):
    configs = []

    def build(config: EngineConfig) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(_cache=SimpleNamespace(layers=[]))

    monkeypatch.setattr(script, "make_model", lambda folder, _: folder)
    monkeypatch.setattr(script, "build_engine", build)
    script.start(tmp_path)

    (config,) = configs
    assert config.model.model_path == str(tmp_path / "model")
    assert config.cache.kv_blocks == script.block_count()
    assert config.scheduler.max_running_requests == script.ROWS
