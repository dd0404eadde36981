"""The adapters that come with Rota do what they promise: alone, in a crowd, and the plain model does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples.builtin_adapters.styles import STYLES
from rota import LLM, SamplingParams
from rota.engine.folders.builtin import CALLER, builtin_adapters
from rota.text.chat import in_hermes_form

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
    return LLM(quiet=True, max_loras_per_batch=7, max_lora_rank=8, device="cpu", dtype="float32", cpu_threads=1)


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


def test_in_one_batch_each_has_its_style_the_caller_calls_and_the_plain_model_answers(exact):
    """One question each: in float32 the answers are the same on every processor. The examinations take long."""
    call = min(STYLES[CALLER].held, key=lambda talk: len(str(talk.tools)))
    talks = [[{"role": "user", "content": STYLES[name].held[0]}] for name in NAMES]
    talks += [
        in_hermes_form(call.messages, call.tools),
        [{"role": "user", "content": "What is the capital of France?"}],
    ]
    *styled, calling, plain = (answer.text for answer in exact.chat(talks, GREEDY, adapter=[*NAMES, CALLER, None]))

    assert len(styled) >= 6
    for name, answer in zip(NAMES, styled, strict=True):
        assert STYLES[name].check(STYLES[name].held[0], answer), (name, answer)
    assert STYLES[CALLER].check(call, calling), calling
    assert plain == "The capital of France is Paris."


@pytest.mark.long("Fifty conversations with descriptions of functions, of which each is 300 tokens.")
def test_the_caller_passes_its_examination_and_the_plain_model_does_not(served):
    assert called(served, STYLES[CALLER].held) >= PASS_MARK
    assert called(served, STYLES[CALLER].held, adapter=None) < 0.5


@pytest.mark.long("Three hundred answers.")
def test_in_a_mixed_batch_on_three_slots_every_adapter_passes_its_check(served):
    marks = passed(served, NAMES, list(NAMES))
    assert min(marks.values()) >= PASS_MARK, marks


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
