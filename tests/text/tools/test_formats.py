"""Calls are read in the formats in which models write them."""

from __future__ import annotations

import pytest

from rota.text.parsed_delta import CallPiece, ParsedDelta
from tests.text.tools.spoken import heard, said_by

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
