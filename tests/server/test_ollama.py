"""Ollama's routes: lines of JSON for programs that speak nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.server.ollama import OllamaFields
from tests.server.letters import serving
from tests.server.speaker import prompt_of

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


def test_the_tokenizers_settings_are_told(client):
    told = client.get("/tokenizer_info").json()

    assert (told["eos_token"], told["tokenizer_class"]) == ("<end>", None)
    assert "message['content']" in told["chat_template"]
