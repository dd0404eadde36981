from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.core.ids import Row
from rota.core.plan import Chunk, StepPlan
from rota.sim.cost import Graphs, LinearCost, read_cost

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
    names = [name for name in LinearCost.__slots__ if name not in ("name", "prefill", "graphs")]
    values = {**dict.fromkeys(names, 0.1), **changes}
    path = folder / "mine.toml"
    path.write_text("\n".join(f"{name} = {value}" for name, value in values.items() if value is not None))
    return path


def graphs(**changes: str) -> str:
    lists = ("decodes", "mixed_decodes", "prompt_tokens", "knots", "knots_s")
    return (
        "{" + ", ".join(f"{name} = {value}" for name, value in (dict.fromkeys(lists, "[1, 2]") | changes).items()) + "}"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"load_s": None}, "lacks load_s"),
        ({"sleep_s": 1}, "has the unknown sleep_s"),
        ({"base_s": "true"}, "base_s must be a number of seconds"),
        ({"base_s": -1.0}, "base_s must be a number of seconds of at least 0"),
        ({"base_s": "?"}, "is not a TOML file"),
        ({"prefill": '"later"'}, "prefill must be one of mixed, alone"),
        ({"graphs": 1}, "graphs must be a table with decodes, mixed_decodes"),
        ({"graphs": graphs(knots="[1, 2, 3]")}, "graphs.knots and graphs.knots_s must be as long"),
        ({"graphs": graphs(decodes="[8, 4]")}, "graphs.decodes must be a list of numbers that grow"),
        ({"graphs": graphs(eager_s="true")}, "graphs.eager_s must be a number of seconds"),
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


GRAPHS = Graphs(
    decodes=(1, 4, 8),
    mixed_decodes=(4, 8),
    prompt_tokens=(16, 64),
    knots=(1, 8, 40, 72),
    knots_s=(0.0, 0.0, 0.32, 0.96),
    lora_token_s=0.001,
    eager_s=0.5,
    eager_lora_s=0.25,
)


@pytest.mark.parametrize(
    ("decodes", "prompt_tokens", "tokens", "has_graph"),
    [
        (1, 0, 1, True),
        (3, 0, 4, True),
        (9, 0, 9, False),
        (0, 5, 20, True),
        (5, 16, 24, True),
        (5, 65, 70, False),
        (9, 16, 25, False),
    ],
)
def test_a_step_is_padded_to_the_next_size_that_has_a_graph(decodes, prompt_tokens, tokens, has_graph):
    assert GRAPHS.padded(decodes, prompt_tokens) == (tokens, has_graph)


def test_tokens_cost_what_the_curve_says():
    cost = replace(COST, graphs=GRAPHS)

    def extra(decodes: int, prompt_tokens: int, adapters: int = 0) -> float:
        counts = (decodes, prompt_tokens, 100, adapters)
        return cost.seconds(*counts) - COST.seconds(*counts)

    assert extra(3, 0) == pytest.approx(0.0)
    assert extra(0, 5) == pytest.approx(0.12)  # padded to 20 tokens: 12 of the 32 that the segment from 8 to 40 has
    assert extra(0, 5, adapters=2) == pytest.approx(0.12 + 0.02)
    assert extra(8, 72) == pytest.approx(0.96 + 0.16 + 0.5)  # beyond the last knot, and without a graph
    assert extra(8, 72, adapters=1) == pytest.approx(0.96 + 0.16 + 0.08 + 0.75)


def test_a_step_with_grammars_takes_longer_by_what_a_step_and_each_row_cost():
    cost = replace(COST, mask_s=0.3, mask_row_s=0.01)

    assert cost.masks_s(0) == 0.0
    assert cost.masks_s(5) == pytest.approx(0.35)
