"""Calls that must be made, or must match their schema, cannot be made otherwise."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.grammar.texts import Tag, json_schema, tagged
from rota.server.calls.prompts import Texts
from rota.server.openai.chat_fields import ChatCall, ChatFields, chat_call
from rota.server.openai.tools import ToolFields, form_of_calls, tool_grammar, tool_use
from rota.text.parsed_delta import CallPiece, ParsedDelta
from rota.text.speech import ParserNames, Speech
from rota.text.tokenizer import Tokenizer
from rota.text.tools.formats import FORMATS, WRITTEN
from tests.grammar.matching import begins, drawn, takes
from tests.server.speaker import ANSWER, Speaker

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tools(strict: bool | None = None) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def grammar_of(form: str = "hermes", wanted: Grammar | None = None, **fields: Any) -> Grammar:
    use = tool_use(ToolFields.model_validate({"tools": tools(), **fields}))
    grammar = tool_grammar(use, form_of_calls(use, form, wanted), wanted, {})
    assert grammar is not None
    return grammar


def heard(form: str, text: str) -> ParsedDelta:
    parser = Speech(tools=form, names=frozenset(SCHEMAS)).parser(lambda: "")
    return parser.push(text) + parser.finish()


def check(call: CallPiece) -> None:
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("form", sorted(WRITTEN))
@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required"}, {"weather", "clock"}, 99),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "clock"}, 1),
        ({"tool_choice": named("weather")}, {"weather"}, 1),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [named("clock")]},
                }
            },
            {"clock"},
            99,
        ),
    ],
)
def test_calls_that_must_be_made_are_made_and_match_their_schema(form, fields, names, most):
    grammar = grammar_of(form, **fields)
    for seed in range(6):
        answer = drawn(grammar, Random(seed), most=2000)
        said = heard(form, answer.text)

        assert answer.is_whole
        assert said.content == ""
        assert 1 <= len(said.whole_calls) <= most
        assert {call.name for call in said.whole_calls} <= names
        for call in said.whole_calls:
            check(call)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"properties": {"a": {"type": "null"}}}, ["{}", '{"a": null}'], ['{"b": null}']),
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": True}, ['{"b": null}'], ['{"a": 1}']),
        ({"properties": {"a": {"properties": {"b": {}}, "type": "object"}}}, ['{"a": {"b": 1}}'], ['{"a": {"c": 1}}']),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}}, ['{"a": null}'], ['{"b": 1}']),
        ({"properties": {"a": {"type": "array", "items": {"enum": [1]}}}}, ['{"a": [1]}'], ['{"a": [2]}', '{"b": 1}']),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {"type": "null"}}}]}, ['{"b": null}'], ['{"b": 1}']),
        ({}, ["{}", '{"a": 1}'], ["[]"]),
    ],
)
def test_arguments_are_those_that_the_function_names(schema, taken, refused):
    function = {"name": "f", "parameters": {"type": "object", **schema} if schema else {"type": "object"}}
    grammar = grammar_of("json", tools=[{"type": "function", "function": function}], tool_choice="required")

    assert [one for one in taken if not takes(grammar, call_of("f", one))] == []
    assert [one for one in refused if takes(grammar, call_of("f", one))] == []


def call_of(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG = CALL.replace("Rome", "Bonn")


def test_a_strict_function_is_kept_to_its_schema_once_a_call_begins():
    grammar = grammar_of(tools=tools(strict=True))

    assert takes(grammar, "Hello.")
    assert takes(grammar, f"Let me see. {CALL}\n{CALL}")
    assert not begins(grammar, WRONG)


def test_a_function_that_is_not_strict_takes_any_object_beside_one_that_is():
    weather, clock = tools()
    clock["function"]["strict"] = True

    assert takes(grammar_of(tools=[weather, clock]), WRONG)


def test_calls_that_may_not_be_parallel_are_one_at_most():
    grammar = grammar_of(parallel_tool_calls=False)

    assert takes(grammar, "Hello.")
    assert takes(grammar, f"Well. {WRONG}")
    assert not takes(grammar, CALL + CALL)


def test_only_tools_that_are_allowed_are_called():
    allowed = {"mode": "auto", "tools": [named("clock")]}
    grammar = grammar_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})

    assert takes(grammar, "Hello.")
    assert not begins(grammar, CALL)


def test_an_answer_of_a_given_form_may_be_a_call_instead():
    grammar = grammar_of(wanted=json_schema({"type": "null"}, "response_format"))

    assert takes(grammar, "null")
    assert takes(grammar, CALL)
    assert not begins(grammar, "Hello")


def test_a_call_may_stand_in_the_place_of_tagged_text():
    wanted = tagged([Tag(begin="<t>", schema={"type": "null"}, end="</t>", trigger="<t>")], "structural_tag")
    grammar = grammar_of(wanted=wanted, tools=tools(strict=True))

    assert takes(grammar, "So <t>null</t>.")
    assert takes(grammar, CALL)
    assert not begins(grammar, "So <t>1")


def test_a_call_that_must_be_made_goes_before_the_form_of_an_answer():
    grammar = grammar_of(wanted=json_schema({"type": "null"}, "response_format"), tool_choice="required")

    assert takes(grammar, CALL)
    assert not begins(grammar, "null")


def test_calls_written_as_python_come_as_json_where_they_must_be_made():
    use = tool_use(ToolFields.model_validate({"tools": tools(), "tool_choice": "required"}))

    assert form_of_calls(use, "pythonic", None) == "json"


@pytest.mark.parametrize("fields", [{"parallel_tool_calls": False}, {"tools": tools(strict=True)}])
def test_calls_written_as_python_cannot_be_kept_to_a_schema_beside_text(fields):
    use = tool_use(ToolFields.model_validate({"tools": tools(), **fields}))
    with pytest.raises(RequestError, match="written as Python, which no grammar keeps"):
        form_of_calls(use, "pythonic", None)


def test_every_format_but_python_can_be_kept():
    assert {*FORMATS} - {*WRITTEN} == {"pythonic"}


def called(folder: Any, template: str, special: tuple[str, ...] = (), **fields: Any) -> tuple[Tokenizer, ChatCall]:
    tokenizer = Tokenizer(Speaker(template, special).write(folder))
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools(), "tool_choice": "required", **fields}
    return tokenizer, chat_call(Texts(tokenizer, parsers=ParserNames()), ChatFields.model_validate(asked))


def grammar_in(call: ChatCall) -> Grammar:
    (sampling,) = call.samplings
    assert sampling.grammar is not None
    return sampling.grammar


def test_thoughts_come_before_a_call_that_must_be_made(tmp_path):
    _, call = called(tmp_path, "{{ messages[0].content }}<think>\n")
    grammar = grammar_in(call)

    assert call.speech.is_thinking
    assert takes(grammar, f"So <tool_call> it is.\n</think>\n\n{CALL}")
    assert not takes(grammar, CALL)


def test_thoughts_that_have_not_begun_need_not_come(tmp_path):
    grammar = grammar_in(called(tmp_path, "{% if false %}<think>{% endif %}{{ messages[0].content }}" + ANSWER)[1])

    assert takes(grammar, CALL)
    assert takes(grammar, f"<think>So.</think>{CALL}")
    assert not begins(grammar, "So")


def test_thoughts_that_have_ended_do_not_come_again(tmp_path):
    _, call = called(tmp_path, "{{ messages[0].content }}<think>\n\n</think>\n\n")

    assert takes(grammar_in(call), CALL)
    assert not begins(grammar_in(call), "<think>")


def test_marks_that_are_special_tokens_are_in_the_grammar_as_such(tmp_path):
    knows = "{% if tools or messages[0].role == 'tool' %}{% endif %}{{ '[TOOL_CALLS]' }}"
    tokenizer, call = called(tmp_path, knows, ("[TOOL_CALLS]",))
    token = tokenizer.special_ids(["[TOOL_CALLS]"])["[TOOL_CALLS]"]

    assert f"<[{token}]>" in grammar_in(call).text
    assert call.text.shown == {token}


def test_a_newer_model_of_mistral_writes_a_name_and_then_its_arguments(tmp_path):
    knows = "{% if tools or messages[0].role == 'tool' %}{% endif %}{{ '[TOOL_CALLS]' }}"
    tokenizer, call = called(tmp_path, knows, ("[TOOL_CALLS]", "[ARGS]"), tool_choice=named("clock"))
    ids = tokenizer.special_ids(["[TOOL_CALLS]", "[ARGS]"])

    written = f'<[{ids["[TOOL_CALLS]"]}]> "clock" <[{ids["[ARGS]"]}]> @tag_0'

    assert written in json.loads(grammar_in(call).text)["grammars"][0]["lark_grammar"]
    assert call.text.shown == {*ids.values()}


def test_the_form_of_an_answer_begins_behind_its_thoughts(tmp_path):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    template = "{{ messages[0].content }}<think>\n"
    _, call = called(tmp_path, template, tools=None, tool_choice=None, response_format=form)

    assert takes(grammar_in(call), "So.</think>\n\nnull")
    assert not takes(grammar_in(call), "null")


def test_an_error_in_a_schema_names_its_place():
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError) as raised:
        grammar_of(tools=[*tools(), tool], tool_choice="required")

    assert raised.value.fault.param == "tools.2.function.parameters"
    assert "at /properties/a/$ref" in raised.value.fault.message
