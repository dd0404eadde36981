"""Thoughts are told from answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.text.parsed_delta import ParsedDelta
from rota.text.reasoning import marks_in
from rota.text.speech import Speech
from tests.text.families import CHATML, QWEN3

quick = settings(max_examples=60, deadline=None)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def heard(*pieces: str, **speech: Any) -> ParsedDelta:
    parser = Speech(**{"reasoning": "think", **speech}).parser(lambda: "call_1")
    return sum(map(parser.push, pieces), ParsedDelta()) + parser.finish()


@pytest.mark.parametrize(
    ("text", "speech", "reasoning", "content"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", {}, "So.", "Yes."),
        ("\n<think>So. </think>Yes.\n", {}, "So.", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", {}, "", "Yes."),
        ("So.\n</think>\nYes.", {"is_thinking": True}, "So.", "Yes."),
        ("So, \n</thin", {"is_thinking": True}, "So, \n</thin", ""),
        ("<think>So", {}, "So", ""),
        ("Yes. <think>So</think>", {}, "", "Yes. <think>So</think>"),
        (" Yes", {}, "", " Yes"),
        ("<thin", {}, "", "<thin"),
        ("[THINK]So.[/THINK]Yes.", {"reasoning": "mistral"}, "So.", "Yes."),
        ("Here is my thought process: So. Here is my response: Yes.", {"reasoning": "granite"}, "So.", "Yes."),
        ("<think>So.</think>Yes.", {"reasoning": ""}, "", "<think>So.</think>Yes."),
        ("<think>So.</think>Yes.", {"shows_reasoning": False}, "", "Yes."),
    ],
)
def test_thoughts_are_told_from_the_answer(text, speech, reasoning, content):
    assert heard(text, **speech) == heard(*text, **speech) == ParsedDelta(content, reasoning)


def test_a_call_behind_the_thoughts_is_read_and_one_within_them_is_a_thought():
    said = heard(f"<think>{CALL}</think>\n{CALL}", tools="hermes", names=frozenset({"f"}))

    assert (said.reasoning, said.content, len(said.whole_calls)) == (CALL, "", 1)


@quick
@given(data=st.data())
def test_any_split_of_any_text_is_heard_the_same(data: Any):
    snippets = st.sampled_from(["<think>", "</think>", "<", "think>", " ", "\n", "so", CALL])
    text = "".join(data.draw(st.lists(snippets | st.text(max_size=3), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    speech = {"is_thinking": data.draw(st.booleans()), "tools": "hermes", "names": frozenset({"f"})}

    assert _in_sum(heard(*pieces, **speech)) == _in_sum(heard(text, **speech))


def _in_sum(said: ParsedDelta) -> tuple[str, str, int]:
    return said.content, said.reasoning, len(said.whole_calls)


def test_thoughts_are_sent_as_they_come_but_for_what_may_be_a_mark():
    parser = Speech(reasoning="think", is_thinking=True).parser(lambda: "")

    assert [parser.push(text).reasoning for text in ("So", " it", " <", "b> is", "\n</th", "ink>")] == [
        *("So", " it", "", " <b> is", "", "")
    ]


def test_the_parser_follows_from_the_template():
    assert [marks_in(text) for text in (QWEN3, CHATML, "... [THINK] ...")] == ["think", "", "mistral"]
