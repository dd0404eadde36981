"""Calls are read in the formats in which models write them, and whatever a model says, no character is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rota.text.parsed_delta import CallPiece, ParsedDelta
from rota.text.tools.formats import FORMATS
from rota.text.tools.json_calls import JsonValue
from rota.text.tools.parser import ToolParser

NAMES = frozenset({"weather", "clock-2"})

Calls = list[tuple[str, str]]


def heard(form: str, *pieces: str) -> tuple[str, Calls]:
    """The content, and the calls with their arguments."""
    said = sum(said_by(form, pieces), ParsedDelta())
    return said.content, [(call.name, call.arguments) for call in said.whole_calls]


def said_by(form: str, pieces: Sequence[str]) -> list[ParsedDelta]:
    """After each piece, and at the end."""
    parser = ToolParser(FORMATS[form], NAMES, lambda: "call_1")
    return [*map(parser.push, pieces), parser.finish()]


# ── formats ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ROME = '{"city": "Rome"}'
CALL = f'{{"name": "weather", "arguments": {ROME}}}'
ROME_ONLY = [("weather", ROME)]


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ROME_ONLY),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", ROME_ONLY * 2),
        ("hermes", f'<tool_call>{{"arguments": {ROME}, "name": "weather"}}</tool_call>', ROME_ONLY),
        ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", ROME_ONLY * 2),
        ("hermes", f"\n\n<tool_call>{CALL}", ROME_ONLY),
        ("hermes", '<tool_call>{"name": "clock-2"}</tool_call>', [("clock-2", "{}")]),
        ("hermes", r'<tool_call>{"name": "weather", "arguments": "{\"a\": 1}"}</tool_call>', [("weather", '{"a": 1}')]),
        ("llama3_json", f'{{"name": "weather", "parameters": {ROME}}}', ROME_ONLY),
        ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ROME}}}', ROME_ONLY),
        ("llama3_json", f"{CALL}; {CALL}", ROME_ONLY * 2),
        ("pythonic", '[weather(city="Rome")]', ROME_ONLY),
        ("pythonic", "[weather(city='Rome'), clock-2()]", [*ROME_ONLY, ("clock-2", "{}")]),
        (
            "pythonic",
            "<|python_start|>[weather(a=[1, 2.5], b={'c': None}, d=True, e='it\\'s (1, 2)', f=false)]",
            [("weather", '{"a": [1, 2.5], "b": {"c": null}, "d": true, "e": "it\'s (1, 2)", "f": false}')],
        ),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", ROME_ONLY * 2),
        ("mistral", f"[TOOL_CALLS]weather{ROME}[TOOL_CALLS]clock-2[ARGS]{{}}", [*ROME_ONLY, ("clock-2", "{}")]),
        ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ROME}", ROME_ONLY),
        ("json", CALL, ROME_ONLY),
        ("json", f"[{CALL}, {CALL}]", ROME_ONLY * 2),
        ("json", f"<|tool_call|>[{CALL}]", ROME_ONLY),
    ],
)
def test_a_call_is_read(form, text, calls):
    assert heard(form, text) == heard(form, *text) == ("", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "Use <tool_call> for that."),
        ("hermes", "<tool_call>weather</tool_call>"),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "mood": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>'),
        ("hermes", r'<tool_call>{"name": "weather", "arguments": "{\"a\": \"\ud800\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "name": "weather"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'weather'}</tool_call>"),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", f"I could say {CALL}"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[nobody(city='Rome')]"),
        ("pythonic", "[weather('Rome')]"),
        ("pythonic", "[weather(city={1, 2})]"),
        ("pythonic", "[weather(city=open('x'))]"),
        ("pythonic", "[weather(city=1e999)]"),
        ("pythonic", f"[weather(city={'[' * 60})]"),
        ("mistral", "[TOOL_CALLS]nobody{}"),
        ("mistral", "[TOOL_CALLS]the weather is fine"),
        ("json", '["a", "b"]'),
        ("json", '{"name": "Ann"}'),
        ("json", "[]"),
    ],
)
def test_what_is_no_call_is_content(form, text):
    assert heard(form, text) == heard(form, *text) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", f"I will look.\n<tool_call>{CALL}</tool_call>", "I will look.\n", ROME_ONLY),
        ("hermes", f"<tool_call>{CALL}</tool_call> Done.", " Done.", ROME_ONLY),
        ("hermes", f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", ROME_ONLY),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": oh}}', "oh}}", [("weather", '{"a": ')]),
        ("hermes", f"<tool_call>{CALL}</tool>", "</tool>", ROME_ONLY),
        ("pythonic", '[weather(city="Rome"), weather(oh)]', ", weather(oh)]", ROME_ONLY),
        ("mistral", f"Well.[TOOL_CALLS]weather{ROME} Done.", "Well. Done.", ROME_ONLY),
    ],
)
def test_text_beside_calls_and_behind_a_fault_is_content(form, text, content, calls):
    assert heard(form, text) == heard(form, *text) == (content, calls)


def test_a_calls_first_piece_has_its_id_and_name_and_the_others_its_arguments_as_they_come():
    text = ["<tool_call>", '{"name": "weather"', ', "arguments": ', '{"ci', 'ty": 1', "}}", "</tool_call>"]

    assert [said for said in said_by("hermes", text) if said] == [
        ParsedDelta(calls=(CallPiece(index=0, call_id="call_1", name="weather"),)),
        ParsedDelta(calls=(CallPiece(index=0, arguments='{"city": 1'),)),
        ParsedDelta(calls=(CallPiece(index=0, arguments="}"),)),
    ]


def test_parallel_calls_have_numbers():
    said = sum(said_by("json", [f"[{CALL},{CALL}]"]), ParsedDelta())

    assert [(piece.index, bool(piece.name)) for piece in said.calls] == [(0, True), (0, False), (1, True), (1, False)]


def test_text_that_cannot_be_a_call_is_not_held_back():
    said = said_by("hermes", ["1 <", " 2, <tool", "s> and"])

    assert [one.content for one in said] == ["1 ", "< 2, ", "<tools> and", ""]


# ── any text ──────────────────────────────────────────────────────────────────────────────────────────────────────────

each_format = pytest.mark.parametrize("form", sorted(FORMATS))
quick = settings(max_examples=25, deadline=None)

SNIPPETS = (
    *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<|tool_call|>"),
    *('{"name": "weather", "arguments": ', '{"name": "weather", "parameters": {', '{"arguments": {}, ', '"name": '),
    *('"clock-2"', "weather", "weather(", "a=", "'x'", '"y"', "{", "}", "[", "]", "(", ")", ",", ":", ";", " ", "\n"),
    *("1", "-0.5e3", "true", "None", '"\\u00e9"', "\\", '"', "é", "so"),
)
texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=12).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(), values, max_size=3)


def pieces_of(data: Any, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@each_format
@quick
@given(data=st.data())
def test_any_split_of_any_text_is_heard_the_same(form: str, data: Any):
    text = data.draw(texts)

    assert heard(form, *pieces_of(data, text)) == heard(form, text)


@each_format
@quick
@given(text=texts)
def test_text_without_calls_is_content_and_content_is_part_of_the_text(form: str, text: str):
    content, calls = heard(form, text)
    rest = iter(text)

    assert all(character in rest for character in content)
    assert calls or content == text


@quick
@given(data=st.data(), said=arguments, before=st.text())
def test_a_call_with_any_arguments_is_read_in_any_split(data: Any, said: dict[str, Any], before: str):
    is_ascii = data.draw(st.booleans())
    text = json.dumps({"name": "weather", "arguments": said}, ensure_ascii=is_ascii)
    content, calls = heard("hermes", *pieces_of(data, f"{before}.<tool_call>{text}</tool_call>"))

    assert content == f"{before}."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", said)]


@quick
@given(said=st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), values, max_size=3))
def test_python_arguments_become_the_same_json(said: dict[str, Any]):
    written = ", ".join(f"{name}={value!r}" for name, value in said.items())
    (call,) = heard("pythonic", f"[weather({written})]")[1]

    assert json.loads(call[1]) == json.loads(json.dumps(said))


@quick
@given(value=values, data=st.data())
def test_a_json_value_is_read_to_its_end_and_not_further(value: Any, data: Any):
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    reader = JsonValue()
    ends = [reader.read(piece, 0) for piece in [*text, " "]]

    assert reader.is_complete
    assert sum(ends) == len(text)


@quick
@given(text=texts)
@example(text='{"a" 1}')
@example(text='{"a": 1x}')
def test_what_python_does_not_read_as_json_is_broken_or_incomplete(text: str):
    reader = JsonValue()
    end = reader.read(text + " ", 0)
    try:
        json.loads(text[:end], parse_constant=int)  # int refuses NaN and Infinity, which only Python reads
    except ValueError:
        assert not reader.is_complete
    else:
        assert reader.is_complete
