"""Answers of a given form over HTTP, from a real engine, with everything else that a call may ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from rota.core.lora_paths import LoraPath
from rota.llm.config import build_device, engine_config
from rota.runtime.client import EngineClient
from rota.runtime.registry import Registry
from rota.text.tokenizer import Tokenizer
from tests.engine.lora.adapter_factory import make_adapter
from tests.engine.model_factory import make_tiny_model
from tests.server.applications import made_app, running
from tests.server.engines import engines
from tests.server.letters import error_of, events_of
from tests.tiny_tokenizer import write_byte_tokenizer
from tests.waiting import TIMEOUT_S

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "age", "names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tiny")
    make_adapter(folder / "pirate", make_tiny_model(write_byte_tokenizer(folder), "smollm2"))
    options = {"device": "cpu", "dtype": "float32", "kv_blocks": 64, "max_running_requests": 4}
    config = engine_config({**options, "model_path": str(folder)}, quiet=True)
    registry = Registry("tiny", str(folder))
    adapter = registry.add(LoraPath(name="pirate", path=str(folder / "pirate")))
    service = EngineClient(engines(partial(build_device, config), config), [adapter])
    app = made_app(service, Tokenizer(folder), registry, has_grammars=True)
    with running(app) as url, httpx.Client(base_url=url) as client:
        service.wait_until_ready(TIMEOUT_S)
        yield client


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "a pet"}], "max_tokens": 250, "seed": 3, **fields}
    return client.post("/v1/chat/completions", json=body)


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"temperature": 0},
        {"model": "pirate"},
        {"ignore_eos": True},
        {"presence_penalty": 1.5, "repetition_penalty": 1.2, "top_p": 0.8},
        {"logprobs": True, "top_logprobs": 2},
    ],
)
def test_an_answer_meets_its_schema(client: httpx.Client, others: dict[str, Any]) -> None:
    (choice,) = chat(client, response_format=FORMAT, **others).json()["choices"]
    assert choice["finish_reason"] == "stop"
    check(choice["message"]["content"])


def test_each_choice_meets_the_schema_by_itself(client: httpx.Client) -> None:
    choices = chat(client, response_format=FORMAT, n=4).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    for choice in choices:
        check(choice["message"]["content"])
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.Client) -> None:
    whole = chat(client, response_format=FORMAT).json()["choices"][0]["message"]["content"]
    events = events_of(chat(client, response_format=FORMAT, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_large_schema_is_read_in_a_worker_and_kept_too(client: httpx.Client) -> None:
    names = [f"n{number}" for number in range(100)]
    schema = {"properties": {name: {"type": "null"} for name in names}, "type": "object", "additionalProperties": False}
    (choice,) = chat(client, guided_json={**schema, "required": names[:2]}, temperature=0).json()["choices"]
    assert re.match(r'\{\s*"n0"\s*:\s*null\s*,\s*"n1"', choice["message"]["content"])


def test_a_seed_repeats_an_answer(client: httpx.Client) -> None:
    first, second = (chat(client, response_format=FORMAT, seed=9).json()["choices"] for _ in range(2))
    assert first == second


def test_an_answer_that_is_cut_says_so(client: httpx.Client) -> None:
    (choice,) = chat(client, response_format=FORMAT, max_tokens=5).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_a_stop_string_ends_an_answer_before_its_grammar_does(client: httpx.Client) -> None:
    (choice,) = chat(client, guided_regex="a{5}-b{5}", stop="-").json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("aaaaa", "stop")


def test_prompts_of_one_call_may_have_different_forms(client: httpx.Client) -> None:
    params = [{"regex": "[0-9]{3}"}, {"ebnf": 'root ::= "yes" | "no"'}, {"json_schema": json.dumps(SCHEMA)}]
    params = [{"max_new_tokens": 250, "sampling_seed": 1, **one} for one in params]
    body = {"text": ["a", "b", "c"], "sampling_params": params, "lora_path": [None, "pirate", None]}
    number, word, pet = (one["text"] for one in client.post("/generate", json=body).json())
    assert re.fullmatch("[0-9]{3}", number)
    assert word in ("yes", "no")
    check(pet)


def test_a_prompt_is_continued_in_a_form(client: httpx.Client) -> None:
    body = {"prompt": ["a", "b"], "guided_choice": ["left", "right"], "echo": True, "logprobs": 1}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert all(re.fullmatch("[ab](left|right)", choice["text"]) for choice in choices)


def test_a_grammar_and_fields_that_leave_no_token_end_with_a_sentence(client: httpx.Client) -> None:
    response = chat(client, guided_choice=["a"], allowed_token_ids=[98])
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("No token is left that may come next")


def test_a_stream_tells_an_error_in_the_form_before_it_begins(client: httpx.Client) -> None:
    response = chat(
        client, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, stream=True
    )
    assert response.status_code == 400
    assert error_of(response)["message"] == "response_format.json_schema.schema cannot be followed: Invalid type: x."


def test_structural_tags_are_json_within_free_text(client: httpx.Client) -> None:
    tags = {"structures": [{"begin": "<", "schema": {"type": "boolean"}, "end": ">"}], "triggers": ["<"]}
    likely = {str(ord("<")): 8}
    (choice,) = chat(client, response_format={"type": "structural_tag", **tags}, logit_bias=likely).json()["choices"]
    _, *tagged, _ = choice["message"]["content"].split("<")  # the last may be cut
    assert len(tagged) > 3
    assert [one for one in tagged if not re.match("(true|false)>", one)] == []
