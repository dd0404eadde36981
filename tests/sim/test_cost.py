from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.core.ids import Row
from rota.core.plan import Chunk, StepPlan
from rota.sim.cost import LinearCost, read_cost

SHIPPED = sorted(entry.name.removesuffix(".toml") for entry in (files("rota.sim") / "costs").iterdir())
COST = LinearCost(
    name="test",
    base_s=1.0,
    prefill_s=0.5,
    lora_s=0.25,
    sequence_s=0.1,
    prompt_token_s=0.01,
    context_token_s=0.001,
    adapter_s=0.05,
    load_s=2.0,
    fetch_s=3.0,
)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_cost_model_that_is_shipped_can_be_read(name):
    assert read_cost(name).seconds(decodes=1, prompt_tokens=0, context_tokens=100, adapters=1) > 0.0


def test_a_step_costs_a_constant_and_a_little_for_everything_in_it():
    decodes = (Row(0), Row(1))
    plan = StepPlan(
        step_id=1,
        decodes=decodes,
        chunks=(Chunk(row=Row(2), start=0, length=10, samples=True),),
        context_tokens=40,
        adapters=3,
    )

    assert COST.step_s(plan) == pytest.approx(1.0 + 0.5 + 0.25 + 2 * 0.1 + 10 * 0.01 + 40 * 0.001 + 3 * 0.05)


def test_a_step_without_prompts_or_adapters_does_not_pay_for_them():
    assert COST.step_s(StepPlan(step_id=1, decodes=(Row(0),))) == pytest.approx(1.1)


def test_prompts_that_are_computed_alone_cost_a_step_of_their_own_before_the_decodes():
    prompts = StepPlan(
        step_id=1, chunks=(Chunk(row=Row(2), start=30, length=10, samples=True),), context_tokens=40, adapters=1
    )
    decodes = StepPlan(step_id=1, decodes=(Row(0), Row(1)), context_tokens=60, adapters=1)
    both = replace(prompts, decodes=decodes.decodes, context_tokens=100)
    alone = replace(COST, prefill="alone", prefix_pair_s=0.0001)
    mixed = replace(alone, prefill="mixed")

    assert alone.step_s(both) == pytest.approx(alone.step_s(prompts) + alone.step_s(decodes))
    assert alone.step_s(both) == pytest.approx(mixed.step_s(both) + COST.base_s + COST.lora_s + COST.adapter_s)
    assert [alone.step_s(one) for one in (prompts, decodes)] == [mixed.step_s(one) for one in (prompts, decodes)]


def write(folder: Path, **changes: object) -> Path:
    names = [name for name in LinearCost.__slots__ if name not in ("name", "prefill")]
    values = {**dict.fromkeys(names, 0.1), **changes}
    path = folder / "mine.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in values.items() if value is not None))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_s": None}, "lacks load_s"),
        ({"sleep_s": 1}, "has the unknown sleep_s"),
        ({"base_s": "true"}, "base_s must be a number of seconds"),
        ({"base_s": -1.0}, "base_s must be a number of seconds of at least 0"),
        ({"base_s": "?"}, "is not a TOML file"),
        ({"prefill": '"later"'}, "prefill must be one of mixed, alone"),
    ],
)
def test_a_cost_file_that_is_wrong_is_refused_with_a_sentence(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_cost(str(write(tmp_path, **changes)))


def test_an_unknown_name_is_answered_with_those_that_are_known():
    with pytest.raises(ConfigError, match="known are a100-llama8b"):
        read_cost("b300")


def test_a_chunk_behind_a_long_prefix_costs_what_it_attends_to():
    cost = replace(COST, prefix_pair_s=1e-9)
    first = StepPlan(step_id=1, chunks=(Chunk(row=Row(0), start=0, length=100, samples=False),), context_tokens=100)
    later = replace(first, chunks=(Chunk(row=Row(0), start=50_000, length=100, samples=False),))
    assert cost.step_s(first) == COST.step_s(first)
    assert cost.step_s(later) - cost.step_s(first) == pytest.approx(50_000 * 100 * 1e-9)


def test_decodes_cost_the_tokens_of_all_rows_whichever_row_has_them():
    rows = tuple(Row(row) for row in range(64))
    even = StepPlan(step_id=1, decodes=rows, context_tokens=64 * 600)
    assert COST.step_s(replace(even, context_tokens=63 * 600 + 7300)) - COST.step_s(even) == pytest.approx(
        COST.context_token_s * 6700
    )
