"""Calls and thoughts in every shape: OpenAI's chat helpers, its responses, Anthropic's messages, Ollama's lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.letters import error_of
from tests.server.speaker import Speaker, speaking
from tests.waiting import TIMEOUT_S

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
OWN_TOOL = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
HELLO = [{"role": "user", "content": "Hello"}]
SAID = '<think>I ask.</think>Well.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def client(speaker, tmp_path_factory) -> Iterator[httpx.Client]:
    with speaking(tmp_path_factory.mktemp("model"), speaker, reasoning_parser="qwen3") as client:
        yield client


@pytest.fixture
def openai(client, speaker) -> Iterator[OpenAI]:
    speaker.text = SAID
    with OpenAI(base_url=f"{client.base_url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_S) as openai:
        yield openai


def test_openais_stream_helper_collects_a_call_of_which_one_step_says_name_and_arguments(openai, speaker):
    speaker.text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    with openai.chat.completions.stream(model="speaker", messages=HELLO, tools=[CHAT_TOOL]) as stream:
        final = stream.get_final_completion()

    (call,) = final.choices[0].message.tool_calls
    assert (call.function.name, call.function.parsed_arguments) == ("weather", {"city": "Rome"})


def test_responses_have_thoughts_text_and_calls_as_items(openai):
    answer = openai.responses.create(model="speaker", input="Hello", tools=[FLAT_TOOL])

    thoughts, message, call = answer.output
    assert thoughts.content[0].text == "I ask."
    assert message.content[0].text == "Well."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})
    assert answer.status == "completed"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_responses_stream_the_same_items(openai):
    with openai.responses.stream(model="speaker", input="Hello", tools=[FLAT_TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()

    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
    assert kinds[-1] == "response.completed"


def test_responses_go_back_as_input_with_the_result_of_a_call(openai, speaker):
    answer = openai.responses.create(model="speaker", input="Hello", tools=[FLAT_TOOL])
    result = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "30 degrees"}
    openai.responses.create(model="speaker", input=[*HELLO, *answer.output, result], tools=[FLAT_TOOL])

    assert "assistant:Well." in speaker.prompt
    assert '"city": "Rome"' in speaker.prompt
    assert "30 degrees" in speaker.prompt


class Verdict(BaseModel):
    is_warm: bool


def test_responses_are_parsed_into_what_their_format_describes(openai, speaker):
    speaker.text = '{"is_warm": true}'
    answer = openai.responses.parse(model="speaker", input="Hello", text_format=Verdict)

    assert answer.output_parsed == Verdict(is_warm=True)
    assert speaker.sampling.grammar is not None


def test_messages_have_thoughts_text_and_calls_as_blocks(client, speaker):
    speaker.text = SAID
    fields: dict[str, Any] = {"messages": HELLO, "tools": [OWN_TOOL], "max_tokens": 200}
    body = client.post("/v1/messages", json=fields).json()

    thoughts, text, use = body["content"]
    assert (thoughts["thinking"], text["text"], use["input"]) == ("I ask.", "Well.", {"city": "Rome"})
    assert body["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "30 degrees"}
    turns = [*HELLO, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
    client.post("/v1/messages", json=fields | {"messages": turns}).raise_for_status()
    assert "30 degrees" in speaker.prompt


def test_messages_stream_each_kind_of_block_by_its_own_deltas(client, speaker):
    speaker.text = SAID
    fields = {"messages": HELLO, "tools": [OWN_TOOL], "max_tokens": 200, "stream": True}
    text = client.post("/v1/messages", json=fields).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]

    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["input"] == {}
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I ask."
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"city": "Rome"}


def test_ollama_tells_thoughts_apart(client, speaker):
    speaker.text = "<think>hm</think>Yes."
    body = client.post("/api/chat", json={"messages": HELLO, "stream": False}).json()

    assert (body["message"]["thinking"], body["message"]["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input.0.call_id",
        ),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "not a name"}]}, "tools.0.name"),
        ("/v1/responses", {"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "colour"}}}},
            "text.format.schema",
        ),
    ],
)
def test_an_error_names_the_place_in_the_clients_own_body(client, path, fields, param):
    response = client.post(path, json=fields)

    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "0.tool_use_id"),
        ({"messages": HELLO, "tools": [{"name": "no name", "input_schema": {}}]}, "tools.0.name"),
        ({"messages": HELLO, "tools": [{"name": "f", "input_schema": {"type": "colour"}}]}, "tools.0.input_schema"),
    ],
)
def test_a_sentence_names_the_place_in_the_clients_own_message(client, fields, place):
    response = client.post("/v1/messages", json={"max_tokens": 5, **fields})

    assert response.status_code == 400
    assert place in response.json()["error"]["message"]
