"""SGLang's report on the prefill delayer comes out of the simulator where prompts are steps of their own."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def report() -> ModuleType:
    """The benchmarks are programs, not a package."""
    return importlib.import_module("policies.prefill_alone")


def test_answers_that_end_one_by_one_cost_output_only_where_prompts_are_computed_alone(report):
    fixed, varied, delayed = report.figures(32, 5)
    mixed_fixed, mixed_varied, _ = report.figures(32, 5, "h200-llama8b")

    assert varied < 0.75 * fixed
    assert delayed > 1.2 * varied
    assert mixed_varied > 0.9 * mixed_fixed


@pytest.mark.long("six runs of up to 1,280 requests each")
def test_the_fall_and_what_the_delayer_brings_back_are_as_reported(report):
    fixed, varied, delayed = report.figures(128, report.WAVES)
    _, few_varied, few_delayed = report.figures(16, report.WAVES)

    assert varied / fixed == pytest.approx(report.REPORTED_FALL, rel=report.WITHIN)
    assert delayed / varied == pytest.approx(report.REPORTED_GAIN[128], rel=report.WITHIN)
    assert few_delayed / few_varied == pytest.approx(report.REPORTED_GAIN[16], rel=report.WITHIN)
