from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rota.core.errors import ConfigError
from rota.sim.calibrate import FITTED, MeasuredStep, calibrate, read_timings, write_cost
from rota.sim.cost import Graphs, LinearCost, read_cost

TRUTH = LinearCost(
    name="truth",
    base_s=0.005,
    prefill_s=0.002,
    lora_s=0.0007,
    sequence_s=0.00001,
    prompt_token_s=0.00004,
    context_token_s=3e-8,
    adapter_s=0.00005,
    load_s=0.1,
    fetch_s=0.2,
)


def measured(cost: LinearCost, noise: float = 0.0, steps: int = 400) -> list[MeasuredStep]:
    """Steps of all kinds as they would be measured on a machine with these costs."""
    dice = random.Random(0)
    made = []
    for _ in range(steps):
        decodes = dice.randint(0, 256)
        prompt_tokens = dice.choice([0, 0, dice.randint(1, 2048)])
        counts = {
            "decodes": decodes,
            "prompt_tokens": prompt_tokens,
            "context_tokens": decodes * dice.randint(1, 2000) + prompt_tokens,
            "adapters": dice.randint(0, 32),
        }
        made.append(MeasuredStep(**counts, seconds=cost.seconds(**counts) * dice.uniform(1 - noise, 1 + noise)))
    return made


def test_the_costs_of_a_linear_machine_are_found_again():
    fit = calibrate(measured(TRUTH), read_cost("a100-llama8b"), "found")

    for name in FITTED:
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3), name
    assert fit.p95_error < 1e-6


def test_what_never_occurred_is_taken_from_the_model_it_starts_from():
    like = read_cost("a100-llama8b")
    decoding = [
        MeasuredStep(
            decodes=decodes, prompt_tokens=0, context_tokens=50 * decodes**2, adapters=0, seconds=0.01 + 1e-5 * decodes
        )
        for decodes in range(1, 50)
    ]
    fit = calibrate(decoding, like, "found")

    assert fit.cost.base_s == pytest.approx(0.01)
    assert fit.cost.sequence_s == pytest.approx(1e-5)
    for name in ("prompt_token_s", "adapter_s", "load_s", "fetch_s"):
        assert getattr(fit.cost, name) == getattr(like, name)


def test_steps_that_mix_prompts_in_are_not_fitted_to_a_model_that_computes_them_alone():
    with pytest.raises(ConfigError, match="truth computes prompts alone"):
        calibrate(measured(TRUTH), replace(TRUTH, prefill="alone"), "found")


def test_the_error_says_how_far_off_the_fit_is():
    fit = calibrate(measured(TRUTH, noise=0.2), read_cost("a100-llama8b"), "found")

    assert 0.05 < fit.median_error < 0.15
    assert fit.median_error < fit.p95_error < 0.25


def test_nothing_costs_less_than_nothing_even_if_the_steps_say_so():
    steps = [
        MeasuredStep(decodes=decodes, prompt_tokens=0, context_tokens=0, adapters=0, seconds=0.01 - 1e-5 * decodes)
        for decodes in range(100)
    ]
    fit = calibrate(steps, read_cost("a100-llama8b"), "found")

    assert all(getattr(fit.cost, name) >= 0.0 for name in FITTED)
    assert fit.cost.sequence_s == 0.0


def test_what_was_written_is_a_cost_model(tmp_path: Path):
    fit = calibrate(measured(TRUTH), read_cost("a100-llama8b"), "mine")
    write_cost(fit, tmp_path / "mine.toml", source=tmp_path / "mine.json")

    assert read_cost(str(tmp_path / "mine.toml")).base_s == pytest.approx(TRUTH.base_s, rel=1e-3)
    assert "400 steps" in (tmp_path / "mine.toml").read_text()


def test_the_curve_of_a_machine_with_graphs_is_found_again_and_written(tmp_path: Path):
    curve = Graphs(
        decodes=(1, 8, 64, 256),
        mixed_decodes=(16, 256),
        prompt_tokens=(128, 512, 1024),
        knots=(1, 64, 256, 512, 1024, 2048, 4096),
        knots_s=(0.0, 0.0002, 0.002, 0.007, 0.02, 0.045, 0.1),
        lora_token_s=1e-6,
        eager_s=0.004,
        eager_lora_s=0.002,
    )
    truth = replace(TRUTH, sequence_s=0.0, prompt_token_s=0.0, graphs=curve)
    flat = replace(curve, knots_s=(0.0,) * 6 + (0.5,), lora_token_s=0.0, eager_s=0.0, eager_lora_s=0.0)
    fit = calibrate(measured(truth, steps=2000), replace(TRUTH, graphs=flat), "found")
    write_cost(fit, tmp_path / "found.toml", source=tmp_path / "found.json")
    found = read_cost(str(tmp_path / "found.toml"))

    assert fit.p95_error < 1e-4
    assert found.graphs is not None
    assert found.graphs.knots_s == pytest.approx(curve.knots_s, rel=0.01)
    assert found.graphs.eager_s == pytest.approx(curve.eager_s, rel=0.01)
    assert found.context_token_s == pytest.approx(truth.context_token_s, rel=0.01)
    assert found.sequence_s == found.prompt_token_s == 0.0


def test_a_part_of_the_curve_that_no_step_reached_rises_as_before():
    curve = Graphs(decodes=(1, 64), mixed_decodes=(64,), prompt_tokens=(64,), knots=(1, 64, 128), knots_s=(0, 1, 3))
    decoding = [
        MeasuredStep(decodes=count, prompt_tokens=0, context_tokens=count, adapters=0, seconds=0.01 * (1 + (count > 1)))
        for count in range(1, 50)
    ]
    found = calibrate(decoding, replace(TRUTH, graphs=curve), "found").cost.graphs

    assert found is not None
    assert found.knots_s[1:] == pytest.approx((0.01, 2.01))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[", "is not a JSON file"),
        ("[]", "at least 20 measured steps"),
        (json.dumps([{"decodes": 1}] * 20), "step 1: a step has decodes"),
        (
            json.dumps([dict(decodes=1, prompt_tokens=0, context_tokens=0, adapters=0, seconds=0)] * 20),
            "seconds must be a number above 0",
        ),
        (
            json.dumps([dict(decodes=1.5, prompt_tokens=0, context_tokens=0, adapters=0, seconds=1)] * 20),
            "decodes must be a whole number",
        ),
    ],
)
def test_timings_that_are_wrong_are_refused_with_a_sentence(tmp_path: Path, content: str, words: str):
    file = tmp_path / "timings.json"
    file.write_text(content)

    with pytest.raises(ConfigError, match=words):
        read_timings(file)
