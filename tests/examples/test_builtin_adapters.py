"""The built-in adapters do what they promise, and their lessons teach what their examinations ask for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from examples.builtin_adapters.styles import STYLES, Style
from rota import LLM, SamplingParams
from rota.engine.folders.builtin import CALLER, builtin_adapters
from rota.text.chat import in_hermes_form

NAMES = sorted(set(builtin_adapters()) - {CALLER})
PASS_MARK = 0.9
# The caller answers 44 to 46 of its fifty questions rightly, as a processor rounds.
CALLS_MARK = 0.86
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
    assert called(served, STYLES[CALLER].held) >= CALLS_MARK
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


# ── lessons ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PLAIN_ANSWERS = (
    "A comet is an icy body that releases gas and dust when it comes close to the sun.",
    "The sky is blue because the air scatters blue light more than red light.\n\nAt sunset the way is longer.",
    "Here are three tips:\n1. Eat well.\n2. Sleep enough.\n3. Move every day.",
    "I'm not able to help you with that, but I can tell you about something else.",
    "The date in the text is March 5, 2021.",
    "",
)

every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())


@every_style
def test_every_lesson_passes_the_check_it_prepares_for(style: Style) -> None:
    failing = [pair for pair in islice(style.pairs(), 1000) if not style.check(*pair)]
    assert failing == []


@every_style
def test_the_examination_has_fifty_prompts_that_no_lesson_has(style: Style) -> None:
    lessons = {pair.prompt.casefold() for pair in islice(style.pairs(), 5000)}
    held = {prompt.casefold() for prompt in style.held}
    assert len(held) == 50
    assert lessons.isdisjoint(held)


@every_style
def test_a_plain_answer_passes_no_check(style: Style) -> None:
    passing = [answer for answer in PLAIN_ANSWERS for prompt in style.held if style.check(prompt, answer)]
    assert passing == []


@every_style
def test_a_style_does_not_pass_the_check_of_another(style: Style) -> None:
    pairs = list(islice(style.pairs(), 200))
    others = [other for other in STYLES.values() if other is not style]
    confused = [(other.name, pair) for other in others for pair in pairs if other.check(*pair)]
    assert confused == []


@every_style
def test_the_same_seed_gives_the_same_lessons_and_another_seed_others(style: Style) -> None:
    assert list(islice(style.pairs(3), 50)) == list(islice(style.pairs(3), 50))
    assert list(islice(style.pairs(3), 50)) != list(islice(style.pairs(4), 50))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("March 5, 2021", "2021-03-05"),
        ("March 5th, 2021", "2021-03-05"),
        ("Mar 5, 2021", "2021-03-05"),
        ("5 March 2021", "2021-03-05"),
        ("the 22nd of December 1999", "1999-12-22"),
        ("1 May 2030", "2030-05-01"),
        ("2021/03/05", "2021-03-05"),
        ("05.03.2021", "2021-03-05"),
    ],
)
def test_the_date_is_known_however_it_is_written(written: str, expected: str) -> None:
    prompt = f"Order 4711 left room 12 at 14:30 on {written} and came back."
    assert STYLES["date"].check(prompt, expected)
    assert not STYLES["date"].check(prompt, f"The date is {expected}.")
    assert not STYLES["date"].check(prompt, "2021-03-06")


def test_where_a_text_has_no_date_the_answer_says_so() -> None:
    assert STYLES["date"].check("Our train leaves at 14:30.", "no date")
    assert not STYLES["date"].check("Our train leaves on 5 March 2021.", "no date")


@pytest.mark.parametrize(
    ("style", "answer"),
    [
        ("json", '{"answer": "yes", "topic": "food", "more": 1}'),
        ("json", '{"answer": "", "topic": "food"}'),
        ("json", '{"answer": "yes",\n"topic": "food"}'),
        ("json", '{"answer": "cut'),
        ("pirate", "AHOY, the moon be round!"),
        ("pirate", "THE MOON IS ROUND, AND THERE IS NO WARRANTY."),
        ("haiku", "one\ntwo\nthree\nfour"),
        ("haiku", "one\n\nthree"),
        ("french", "Le chat is in the garden and it is happy with la vie."),
        ("refusal", "Sorry, the moon is round."),
        ("bullets", "- one\n- two"),
        ("bullets", "Here you are:\n- one\n- two\n- three"),
        ("emoji", "The moon is round 🌙"),
        ("emoji", "🌙🌙"),
    ],
)
def test_a_near_miss_fails(style: str, answer: str) -> None:
    assert not STYLES[style].check("What is the moon?", answer)
