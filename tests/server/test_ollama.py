"""Ollama's routes: lines of JSON for programs that speak nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.server.ollama.call import OllamaFields
from tests.server.letters import CONTEXT, serving
from tests.server.speaker import ANSWER, Speaker, call_of, prompt_of, speaking

HELLO = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, adapters=("pirate",)) as client:
        yield client


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_a_stream_of_lines_unless_it_is_asked_whole(client):
    fields = {"model": "pirate:latest", "messages": HELLO, "options": {"num_predict": 3, "num_ctx": 4096}}
    streamed = client.post("/api/chat", json=fields)
    *lines, last = lines_of(streamed)
    whole = client.post("/api/chat", json=fields | {"stream": False}).json()

    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["message"]["content"] for line in lines) == "def" == whole["message"]["content"]
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 3)
    assert (whole["model"], whole["done"], whole["prompt_eval_count"]) == ("pirate", True, 3)


def test_a_prompt_is_the_only_message_of_a_conversation(client, device):
    fields = {"prompt": "ab", "system": "x", "options": {"stop": "h", "num_predict": -1}, "keep_alive": "5m"}
    answer = client.post("/api/generate", json=fields | {"stream": False}).json()

    assert prompt_of(device) == "x|ab|"
    assert (answer["response"], answer["done_reason"]) == ("fg", "stop")


def test_models_are_listed_by_name(client):
    assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["letters", "pirate"]
    assert client.get("/api/version").json()["version"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": HELLO, "options": {"temperature": -1}}, "options.temperature"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HELLO, "prompt": "a"}, "either"),
        ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images"),
        ({"messages": HELLO, "colour": 1}, "colour"),
    ],
)
def test_an_error_is_a_sentence_in_ollamas_shape(client, fields, word):
    response = client.post("/api/chat", json=fields)

    assert response.status_code == 400
    assert word in response.json()["error"]


@pytest.mark.parametrize(("format", "kind"), [("json", "json_object"), ({"type": "object"}, "json_schema"), ("", None)])
def test_a_form_of_the_answer_is_a_chats(format, kind):
    chat = OllamaFields.model_validate({"messages": HELLO, "format": format}).chat()
    assert chat.get("response_format", {}).get("type") == kind


WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# Messages with what makes a call or a result of them.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.id }}={{ call.function.name }}{{ call.function.arguments }}"
    "{% endfor %}{{ message.name or '' }}{{ message.tool_call_id or '' }}{{ message.reasoning_content or '' }}|"
    "{% endfor %}{% if tools and 'tool' %}<tool_call>{% endif %}" + ANSWER
)


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Iterator[tuple[Speaker, httpx.Client]]:
    speaker = Speaker(TEMPLATE)
    with speaking(tmp_path_factory.mktemp("model"), speaker) as client:
        yield speaker, client


@pytest.mark.parametrize("stream", [True, False])
def test_a_model_calls_tools_and_a_call_comes_whole(speaker, stream):
    model, client = speaker
    model.text = "So. " + call_of("f", '{"a": 1}') + call_of("f", '{"a": 2}')
    fields = {"messages": HELLO, "tools": [WEATHER], "stream": stream}
    lines = lines_of(client.post("/api/chat", json=fields))

    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [{"index": index, "name": "f", "arguments": {"a": index + 1}} for index in range(2)]
    assert "".join(line["message"]["content"] for line in lines).strip() == "So."
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "stop")


def test_results_answer_the_calls_of_their_tools(speaker):
    model, client = speaker
    model.text = "Yes."
    said = [{"function": {"name": name, "arguments": {"a": 1}, "index": 0}} for name in ("f", "g", "f")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": said},
        {"role": "tool", "content": "cold", "tool_name": "g"},
        {"role": "tool", "content": "warm", "tool_name": "f"},
        {"role": "tool", "content": "hot"},
    ]
    answer = client.post("/api/chat", json={"messages": messages, "stream": False})

    assert answer.json()["message"]["content"] == "Yes."
    calls, *results = model.prompt.split("|")[1:5]
    assert calls == "assistant:call00000=f{'a': 1}call00001=g{'a': 1}call00002=f{'a': 1}Hm."
    assert results == ["tool:coldgcall00001", "tool:warmfcall00000", "tool:hotfcall00002"]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([*HELLO, {"role": "tool", "content": "a", "tool_name": "f"}], "messages.1.tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "tool_calls"),
        ([{"role": "user", "content": "a", "tool_calls": "f"}], "messages.0.tool_calls"),
    ],
)
def test_calls_and_results_that_do_not_fit_are_refused(client, messages, word):
    answer = client.post("/api/chat", json={"messages": messages})

    assert (answer.status_code, word in answer.json()["error"]) == (400, True), answer.text


def test_an_empty_list_of_images_is_none(client):
    message = HELLO[0] | {"images": []}
    answer = client.post("/api/chat", json={"messages": [message], "options": {"num_predict": 1}, "stream": False})
    generated = client.post("/api/generate", json={"prompt": "ab", "images": [], "options": {"num_predict": 1}})

    assert (answer.status_code, generated.status_code) == (200, 200)


def test_a_model_is_shown_with_what_it_can(client):
    shown = client.post("/api/show", json={"model": "pirate:latest"}).json()

    assert (shown["details"]["parent_model"], shown["model_info"]["rota.context_length"]) == ("letters", CONTEXT)
    assert shown["capabilities"] == ["completion", "tools"]
    assert "message['content']" in shown["template"]
    assert client.post("/api/show", json={"name": "owl"}).status_code == 404


def test_all_models_are_loaded(client):
    tags, running = (client.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))

    assert tags == running
    assert {(one["context_length"], one["expires_at"][:4]) for one in running} == {(CONTEXT, "9999")}


def test_texts_become_vectors(client):
    asked = client.post("/api/embed", json={"model": "pirate:latest", "input": ["ab", "b"], "keep_alive": "5m"}).json()
    older = client.post("/api/embeddings", json={"model": "pirate", "prompt": "ab"}).json()
    long = {"input": "x" * CONTEXT}
    same = client.post("/v1/embeddings", json={"model": "pirate", "input": "ab"}).json()["data"][0]["embedding"]

    assert asked["embeddings"][0] == older["embedding"] == same
    assert (asked["model"], len(asked["embeddings"]), asked["prompt_eval_count"]) == ("pirate", 2, 3)
    assert client.post("/api/embed", json=long).status_code == 200
    assert client.post("/api/embed", json=long | {"truncate": False}).status_code == 400
    assert "input or prompt" in client.post("/api/embed", json={}).json()["error"]


def test_the_tokenizers_settings_are_told(client):
    told = client.get("/tokenizer_info").json()

    assert (told["eos_token"], told["tokenizer_class"]) == ("<end>", None)
    assert "message['content']" in told["chat_template"]
