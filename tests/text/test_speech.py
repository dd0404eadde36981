"""Thoughts are told from answers, and which parsers do so follows from the template or the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rota.core.config import ServerConfig
from rota.text.parsed_delta import ParsedDelta
from rota.text.reasoning import MARKS, marks_in
from rota.text.speech import ParserNames, Speech
from rota.text.tokenizer import Tokenizer
from rota.text.tools.formats import FORMATS
from tests.text.families import CHATML, FAMILIES, QWEN3, Family

# ── which parsers ─────────────────────────────────────────────────────────────────────────────────────────────────────

KNOWS = "{{ tools }}{% if messages[0].role == 'tool' %}{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (CHATML, "hermes", ""),
        (QWEN3, "hermes", "think"),
        (KNOWS + "<tool_call>", "hermes", ""),
        (KNOWS + "{{ '[TOOL_CALLS]' }}[THINK]", "mistral", "mistral"),
        (KNOWS + "<|python_tag|>", "llama3_json", ""),
        (KNOWS + "<|python_start|>", "pythonic", ""),
        (KNOWS + "<|tool_call|>Here is my thought process:", "json", "granite"),
        ("[TOOL_CALLS]", "hermes", ""),  # it knows no tools, so they are rendered in Hermes' form
    ],
)
def test_a_template_tells_how_its_model_calls_and_thinks(tmp_path: Path, template: str, tools: str, reasoning: str):
    chat = Tokenizer(Family(template, FAMILIES["chatml"].special).write(tmp_path)).chat

    assert (ParserNames().tools_of(chat), ParserNames().reasoning_of(chat)) == (tools, reasoning)
    assert (ParserNames("json", "think").tools_of(chat), ParserNames("json", "think").reasoning_of(chat)) == (
        "json",
        "think",
    )
    assert (ParserNames("none", "none").tools_of(chat), ParserNames("none", "none").reasoning_of(chat)) == ("", "")


def test_the_flags_name_every_parser():
    kinds = get_type_hints(ServerConfig)

    assert {*get_args(kinds["tool_call_parser"])} == {*FORMATS, "auto", "none"}
    assert {*get_args(kinds["reasoning_parser"])} == {*MARKS, "auto", "none"}


# ── thoughts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

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
