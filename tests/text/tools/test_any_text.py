"""Whatever a model says, in whatever pieces: no character is lost, and none comes twice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rota.text.tools.formats import FORMATS
from rota.text.tools.json_calls import JsonValue
from tests.text.tools.spoken import heard

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
