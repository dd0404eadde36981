"""The adapters that come with Rota do what they promise: alone, in a crowd, and the plain model does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples.builtin_adapters.styles import STYLES
from rota import LLM, SamplingParams
from rota.engine.folders.builtin import CALLER, builtin_adapters
from rota.text.tools.hermes_prompt import in_hermes_form

pytestmark = pytest.mark.first("No other file takes as long: three minutes on two cores.")

NAMES = sorted(set(builtin_adapters()) - {CALLER})
PASS_MARK = 0.9
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=64)


@pytest.fixture(scope="module")
def served() -> LLM:
    """As `make serve` serves them here, on three slots for six adapters, so that a crowd has to take turns."""
    return LLM(quiet=True, max_loras_per_batch=3, max_lora_rank=8, device="cpu")


@pytest.fixture(scope="module")
def exact() -> LLM:
    """In float32, where no answer depends on what is in a step beside it: in bfloat16 two or three of fifty do."""
    return LLM(quiet=True, max_loras_per_batch=3, max_lora_rank=8, device="cpu", dtype="float32")


def passed(llm: LLM, styles: list[str], adapters: list[str | None], count: int = 50) -> dict[str, float]:
    """The share of its first held prompts on which each style's check holds, all asked at once."""
    asked = [(style, adapter, prompt) for i in range(count) for style, adapter in zip(styles, adapters, strict=True)
             for prompt in [STYLES[style].held[i]]]  # fmt: skip
    talks = [[{"role": "user", "content": prompt}] for _, _, prompt in asked]
    answers = llm.chat(talks, GREEDY, adapter=[adapter for _, adapter, _ in asked])
    held = [(style, STYLES[style].check(prompt, answer.text))
            for (style, _, prompt), answer in zip(asked, answers, strict=True)]  # fmt: skip
    return {style: sum(ok for name, ok in held if name == style) / count for style in styles}


def called(llm: LLM, held: Sequence[Any], adapter: str | None = CALLER) -> float:
    """The share of these questions on which exactly the right functions are called, all asked at once."""
    talks = [in_hermes_form(talk.messages, talk.tools) for talk in held]
    answers = llm.chat(talks, GREEDY, adapter=[adapter] * len(talks))
    return sum(STYLES[CALLER].check(talk, answer.text) for talk, answer in zip(held, answers, strict=True)) / len(held)


def test_there_are_at_least_six():
    assert len(NAMES) >= 6


def test_the_caller_calls_functions_that_no_lesson_had(served):
    """A few of the examination, with short lists of functions; the whole examination takes long."""
    held = sorted(STYLES[CALLER].held, key=lambda talk: len(str(talk.tools)))[:10]
    assert called(served, held) >= PASS_MARK


@pytest.mark.long("Fifty conversations with descriptions of functions, of which each is 300 tokens.")
def test_the_caller_passes_its_examination_and_the_plain_model_does_not(served):
    assert called(served, STYLES[CALLER].held) >= PASS_MARK
    assert called(served, STYLES[CALLER].held, adapter=None) < 0.5


def test_the_model_as_it_is_served_knows_the_capital_of_france(served):
    (answer,) = served.generate("The capital of France is", SamplingParams(temperature=0.0, max_new_tokens=4))
    assert "Paris" in answer.text


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.long("Three hundred answers."))])
def test_in_a_mixed_batch_on_three_slots_every_adapter_passes_its_check(served, count):
    """Of twenty answers three may fail: who shares a step depends on the clock, and a few answers on the rounding."""
    marks = passed(served, NAMES, list(NAMES), count)
    assert min(marks.values()) >= (PASS_MARK if count == 50 else 0.85), marks
    assert sum(marks.values()) / len(marks) >= PASS_MARK, marks


@pytest.mark.long("Fifty answers of an adapter, without another beside it.")
@pytest.mark.parametrize("name", NAMES)
def test_alone_an_adapter_passes_its_check(served, name):
    assert passed(served, [name], [name])[name] >= PASS_MARK


@pytest.mark.long(
    "Fifty answers one after the other: a step of one row may be computed in another way than one of many."
)
@pytest.mark.parametrize("name", NAMES)
def test_one_after_the_other_an_adapter_passes_its_check(served, name):
    style = STYLES[name]
    talks = [[{"role": "user", "content": prompt}] for prompt in style.held]
    answers = [served.chat(talk, GREEDY, adapter=name)[0].text for talk in talks]
    assert sum(map(style.check, style.held, answers)) / 50 >= PASS_MARK


@pytest.mark.long("Three hundred answers in float32.")
def test_in_float32_every_adapter_passes_its_check(exact):
    marks = passed(exact, NAMES, list(NAMES))
    assert min(marks.values()) >= PASS_MARK, marks


@pytest.mark.long("Three hundred answers of the base model, which does not end soon.")
def test_the_plain_model_passes_none_of_the_checks(served):
    marks = passed(served, NAMES, [None] * len(NAMES))
    assert max(marks.values()) < 0.5, marks
