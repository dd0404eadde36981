from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.letters import CONTEXT, error_of, serving

CHAT = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model")) as client:
        yield client


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_becomes_tokens_and_tokens_become_it_again(client, prefix):
    tokens = client.post(f"{prefix}/tokenize", json={"model": "letters", "prompt": "aé"}).json()
    text = client.post(f"{prefix}/detokenize", json={"model": "letters", "tokens": tokens["tokens"]}).json()

    assert tokens == {"tokens": [97, 0xC3, 0xA9], "count": 3, "max_model_len": CONTEXT, "token_strs": None}
    assert text == {"prompt": "aé"}


def test_a_conversation_is_rendered_first(client):
    body = client.post("/v1/tokenize", json={"messages": CHAT, "return_token_strs": True}).json()

    assert body["token_strs"] == ["a", "b", "|"]


def test_a_conversation_is_rendered_with_its_tools(client):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    tokens = client.post("/v1/tokenize", json={"messages": CHAT, "tools": tools}).json()["tokens"]

    assert '{"name": "weather", "parameters": {"type": "object", "properties": {}}}' in bytes(tokens).decode()


def test_a_special_token_is_shown_as_it_is_written(client):
    body = client.post("/v1/tokenize", json={"prompt": "<1>a<end>", "return_token_strs": True}).json()

    assert (body["tokens"], body["token_strs"]) == ([1, ord("a"), 2], ["<1>", "a", "<end>"])


@pytest.mark.parametrize(
    ("route", "fields", "param", "words"),
    [
        ("tokenize", {}, "prompt", "Send either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": CHAT}, "prompt", "Send either prompt or messages"),
        ("tokenize", {"prompt": ["a"]}, "prompt", "prompt should be a valid string"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "for messages only"),
        ("tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens", "writes its own"),
        ("tokenize", {"messages": []}, "messages", "at least 1 item"),
        ("detokenize", {}, "tokens", "tokens is missing"),
        ("detokenize", {"tokens": [7, 300]}, "tokens.1", "tokens.1 is the token id 300"),
        ("detokenize", {"tokens": "abc"}, "tokens", "tokens should be a valid"),
        (
            "tokenize",
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "add_generation_prompt must be false",
        ),
        ("tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "for messages only"),
        (
            "tokenize",
            {"messages": CHAT, "chat_template": "{{ x }}"},
            "chat_template",
            "does not support chat_template; put a chat_template.jinja",
        ),
        ("tokenize", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
        ("tokenize", {"prompt": "x", "tools": []}, "tools", "tools is for messages only"),
    ],
)
def test_what_is_no_text_or_no_token_is_refused(client, route, fields, param, words):
    response = client.post(f"/v1/{route}", json=fields)

    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert words in error_of(response)["message"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_fields_that_ask_for_nothing_are_taken(client, prefix):
    nothing = {"continue_final_message": False, "chat_template": None, "tools": None}
    chat = client.post(f"{prefix}/tokenize", json={"messages": CHAT} | nothing)
    text = client.post(f"{prefix}/tokenize", json={"prompt": "a"} | nothing)

    assert (chat.json()["count"], text.json()["count"]) == (3, 1)


def test_a_conversation_may_end_inside_its_last_message(client):
    body = client.post("/v1/tokenize", json={"messages": CHAT, "continue_final_message": True}).json()
    closed = client.post("/v1/tokenize", json={"messages": CHAT}).json()

    assert closed["tokens"] == [*body["tokens"], ord("|")]


def test_an_unknown_model_is_404(client):
    assert client.post("/v1/tokenize", json={"prompt": "a", "model": "gpt-9"}).status_code == 404
