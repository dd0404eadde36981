"""Every client's way to ask for an answer of a given form, in each route."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rota.core.errors import RequestError
from rota.core.grammar import Grammar
from rota.core.request import SamplingParams
from rota.grammar import texts
from rota.server.calls.prompts import TextLimits, Texts
from rota.server.native.call import read_generate
from rota.server.openai.chat_fields import read_chat
from rota.server.openai.completions import read_completion
from rota.text.tokenizer import Tokenizer
from tests.fakes import FakeDevice
from tests.server.letters import error_of, serving
from tests.tiny_tokenizer import write_byte_tokenizer

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
AS_TEXT = json.dumps(SCHEMA)
GBNF = 'root ::= "a" | "b"'
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
END = 2

JSON, OBJECT = texts.json_schema(SCHEMA, ""), texts.json_object("")
REGEX, CHOICE, EBNF = texts.regex("a+", ""), texts.choice(["a", "b"], ""), texts.ebnf(GBNF, "")
TAGGED = texts.tagged([texts.Tag(begin="<f>", schema=SCHEMA, end="</f>", trigger="<f")], "")

OF_SGLANG: list[tuple[dict[str, Any], Grammar | None, str]] = [
    ({"json_schema": AS_TEXT}, JSON, "json_schema"),
    ({"json_schema": SCHEMA}, JSON, "json_schema"),
    ({"regex": "a+"}, REGEX, "regex"),
    ({"ebnf": GBNF}, EBNF, "ebnf"),
    ({"structural_tag": json.dumps({"type": "structural_tag", **TAGS})}, TAGGED, "structural_tag"),
    ({"structural_tag": TAGS}, TAGGED, "structural_tag"),
    ({"regex": None, "ebnf": "", "json_schema": None}, None, ""),
]
OF_OPENAI: list[tuple[dict[str, Any], Grammar | None, str]] = [
    *OF_SGLANG,
    ({"response_format": {"type": "text"}}, None, ""),
    ({"response_format": {"type": "json_object"}}, OBJECT, "response_format"),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, JSON, "response_format.value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        JSON,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "strict": False}}},
        OBJECT,
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag", **TAGS}}, TAGGED, "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json": AS_TEXT, "disable_fallback": True}}, JSON, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, REGEX, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": GBNF}}, EBNF, "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, OBJECT, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGGED, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}, None, ""),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, JSON, "guided_json"),
    ({"guided_json": AS_TEXT}, JSON, "guided_json"),
    ({"guided_regex": "a+"}, REGEX, "guided_regex"),
    ({"guided_choice": ["a", "b"]}, CHOICE, "guided_choice"),
    ({"guided_grammar": GBNF}, EBNF, "guided_grammar"),
    ({"guided_json": True}, texts.json_schema(True, ""), "guided_json"),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, REGEX, "guided_regex"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model"))), TextLimits())


def chat(source: Texts, fields: dict[str, Any]) -> SamplingParams:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    return read_chat(source, body).samplings[0]


def completion(source: Texts, fields: dict[str, Any]) -> SamplingParams:
    return read_completion(source, json.dumps({"prompt": "a", **fields}).encode()).samplings[0]


def generate(source: Texts, fields: dict[str, Any]) -> SamplingParams:
    call = read_generate(source, json.dumps({"text": "a", "sampling_params": fields}).encode())
    if call.fault:
        raise RequestError(call.fault)
    return call.samplings[0]


@pytest.mark.parametrize(("fields", "grammar", "param"), OF_OPENAI)
@pytest.mark.parametrize("read", [chat, completion])
def test_each_way_to_ask_gives_its_grammar(source: Texts, read: Any, fields: Any, grammar: Any, param: str) -> None:
    sampling = read(source, fields)
    assert sampling.grammar == grammar
    assert grammar is None or sampling.grammar.param == param


@pytest.mark.parametrize(("fields", "grammar", "param"), OF_SGLANG)
def test_each_way_to_ask_in_generate_gives_its_grammar(source: Texts, fields: Any, grammar: Any, param: str) -> None:
    sampling = generate(source, fields)
    assert sampling.grammar == grammar
    assert grammar is None or (sampling.grammar and sampling.grammar.param == f"sampling_params.{param}")


@pytest.mark.parametrize("read", [chat, completion, generate])
@pytest.mark.parametrize("others", [{}, {"ignore_eos": True}, {"stop_token_ids": [9]}])
def test_an_end_token_ends_an_answer_that_is_complete(source: Texts, read: Any, others: dict[str, Any]) -> None:
    sampling = read(source, {"regex": "a+", **others})
    assert END in sampling.stop_token_ids
    assert not sampling.ignore_eos


def test_a_prompt_that_is_only_echoed_follows_no_grammar(source: Texts) -> None:
    assert completion(source, {"regex": "a+", "echo": True, "max_tokens": 0}).grammar is None


LIST = {"type": "array", "items": {"uniqueItems": True}}


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf both say what the answer looks like; send one."),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "response_format",
            "guided_json and response_format both say what the answer looks like; send one.",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and",
        ),
        ({"json_schema": "{"}, "json_schema", "json_schema is not JSON: EOF while parsing"),
        ({"json_schema": "[1]"}, "json_schema", "json_schema must be a JSON schema: an object, true or false."),
        ({"guided_json": 5}, "guided_json", "guided_json must be a JSON schema"),
        ({"guided_json": LIST}, "guided_json", "guided_json, at /items: 'uniqueItems' is not supported"),
        ({"guided_json": False}, "guided_json", "guided_json: no answer meets the schema false."),
        ({"guided_choice": []}, "guided_choice", "guided_choice is empty"),
        ({"guided_choice": "a"}, "guided_choice", "guided_choice should be a valid array."),
        (
            {"guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "Rota does not support guided_whitespace_pattern; blanks",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "Rota does not support structured_outputs.disable_any_whitespace; blanks in JSON are bounded",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "'structured_outputs.jsn' is not a field."),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type should be 'text', 'json_object'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is missing",
        ),
        ({"structural_tag": {"format": {}}}, "structural_tag.format", "structural_tag.format is not supported; send"),
        (
            {"structural_tag": {"structures": []}},
            "structural_tag",
            "structural_tag must be an object with 'structures'",
        ),
        (
            {"structural_tag": {**TAGS, "triggers": ["x"]}},
            "structural_tag.structures.0.begin",
            "structural_tag.structures.0",
        ),
        (
            {"structural_tag": {**TAGS, "structures": [1]}},
            "structural_tag.structures.0",
            "structural_tag.structures.0 must",
        ),
        ({"ebnf": "top ::= x"}, "ebnf", "ebnf is not GBNF: there is no rule 'root'"),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_is_wrong_is_refused_by_its_name(source: Texts, read: Any, fields: Any, param: str, sentence: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(source, fields)
    assert refusal.value.fault.message.startswith(sentence)
    assert refusal.value.fault.param == param


def test_generate_names_the_field_with_its_place(source: Texts) -> None:
    with pytest.raises(RequestError) as refusal:
        generate(source, {"regex": "a", "ebnf": "b"})
    assert refusal.value.fault.param == "sampling_params.ebnf"


Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def client(device: FakeDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, has_grammars=True) as client:
        yield client


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
]


@pytest.mark.parametrize(("route", "body"), CALLS)
@pytest.mark.parametrize("others", [{}, {"stream": True}, {"n": 2, "seed": 1, "stop": "x", "presence_penalty": 1}])
def test_the_engine_gets_the_grammar(
    client: httpx.Client, device: FakeDevice, route: str, body: Any, others: Any
) -> None:
    before = len(device.plans)
    assert client.post(route, json={**body, **others, "guided_regex": "[a-z]+"}).status_code == 200
    seats = [seat for plan in list(device.plans)[before:] for seat in plan.seats]
    assert seats
    assert {seat.sampling.grammar for seat in seats} == {texts.regex("[a-z]+", "guided_regex")}


@pytest.mark.parametrize(("route", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_no_answer_can_follow_is_a_400(
    client: httpx.Client, route: str, body: Any, stream: bool
) -> None:
    response = client.post(route, json={**body, "stream": stream, "guided_regex": "(a"})
    assert response.status_code == 400
    assert error_of(response)["param"] == "guided_regex"
    assert error_of(response)["message"].startswith("guided_regex cannot be followed: invalid regex")


def test_a_prompt_of_generate_has_a_grammar_of_its_own(client: httpx.Client, device: FakeDevice) -> None:
    before = len(device.plans)
    params = [{"regex": "a+", "max_new_tokens": 1}, {"max_new_tokens": 1}, {"ebnf": GBNF, "max_new_tokens": 1}]
    assert client.post("/generate", json={"text": ["a", "b", "c"], "sampling_params": params}).status_code == 200
    seats = [seat for plan in list(device.plans)[before:] for seat in plan.seats]
    assert {seat.sampling.grammar for seat in seats} == {REGEX, None, EBNF}


def test_a_server_without_grammars_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        response = client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"})
    assert response.status_code == 400
    assert error_of(response)["message"] == "guided_regex is not supported: this server was started without grammars."
