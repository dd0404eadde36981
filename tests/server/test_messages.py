"""/v1/messages in Anthropic's shape. Its own client asks it in tests/clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.server.access.keys import Key, KeyRing, digest_of
from rota.server.messages.call import MessagesConversation, PromptFields, _translated
from tests.server.letters import CONTEXT, serving
from tests.server.speaker import named_events_of, prompt_of

HELLO = [{"role": "user", "content": "ab"}]
KEYS = KeyRing({digest_of("sk-all"): Key("all"), digest_of("sk-slow"): Key("slow", requests_per_minute=1)})


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, keys=KEYS, adapters=("pirate",)) as client:
        client.headers.update({"x-api-key": "sk-all", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"})
        yield client


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 3, "temperature": 0, **fields})


def test_a_message_is_answered_with_a_message(client, device):
    body = ask(client, model="pirate", system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])

    assert prompt_of(device) == "x|ab|"
    assert body.json() | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "pirate",
        "content": [{"type": "text", "text": "fgh"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


def test_what_agent_programs_send_beside_is_taken(client):
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    fields = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [edit]},
        "metadata": {"user_id": "u"},
    }

    assert ask(client, **fields).status_code == 200
    assert client.post("/v1/messages?beta=true", json={"messages": HELLO, "max_tokens": 1}).status_code == 200
    assert ask(client, context_management={"edits": [edit | {"keep": 1}]}).status_code == 400


def test_an_answer_says_which_text_ended_it(client):
    body = ask(client, stop_sequences=["z", "f"], max_tokens=20).json()

    assert (body["stop_reason"], body["stop_sequence"], body["content"][0]["text"]) == ("stop_sequence", "f", "de")


def test_a_stream_opens_and_closes_its_message_and_its_block(client):
    events = named_events_of(ask(client, stream=True))
    kinds = [event["type"] for event in events]

    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 3
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "def"
    assert (events[-2]["delta"]["stop_reason"], events[-2]["usage"]["output_tokens"]) == ("max_tokens", 3)


def test_an_answer_goes_on_with_a_last_message_of_the_models_own(client, device):
    begun = [*HELLO, {"role": "assistant", "content": "xy"}]

    assert ask(client, messages=begun).status_code == 200
    assert prompt_of(device) == "ab|xy"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "role 'user'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_done_is_refused_in_anthropics_shape(client, fields, word):
    response = ask(client, **fields)

    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert word in response.json()["error"]["message"]


def test_every_error_of_the_route_has_anthropics_shape(client):
    nobody = client.post("/v1/messages", json={}, headers={"x-api-key": "sk-no"})
    unknown = ask(client, model="gpt-9")
    long = ask(client, messages=[{"role": "user", "content": "x" * CONTEXT}])
    slow = [client.post("/v1/messages", json={}, headers={"x-api-key": "sk-slow"}) for _ in range(2)][1]
    wrong = client.get("/v1/messages")

    kinds = [
        (answer.status_code, answer.json()["type"], answer.json()["error"]["type"])
        for answer in (nobody, unknown, long, slow, wrong)
    ]
    assert kinds == [
        (401, "error", "authentication_error"),
        (404, "error", "not_found_error"),
        (400, "error", "invalid_request_error"),
        (429, "error", "rate_limit_error"),
        (405, "error", "invalid_request_error"),
    ]
    assert "retry-after" in slow.headers


def test_tokens_are_counted_also_of_what_does_not_fit(client):
    def count(text: str) -> Any:
        fields = {"messages": [{"role": "user", "content": text}], "system": "x"}
        return client.post("/v1/messages/count_tokens", json=fields).json()

    assert count("ab") == {"input_tokens": len("x|ab|")}
    assert count("x" * CONTEXT) == {"input_tokens": CONTEXT + 3}


def test_an_effort_and_a_form_of_the_answer_are_a_chats():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = {"messages": HELLO, "output_config": {"effort": "low", "format": form}}
    body = _translated(PromptFields.model_validate(asked), {}).body

    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_calls_and_their_results_become_messages_of_a_chat():
    fields = PromptFields.model_validate_json(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "how warm?"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "I ask.", "signature": ""},
                            {"type": "text", "text": "Let me see."},
                            {"type": "tool_use", "id": "t1", "name": "warmth", "input": {"in": "Oslo"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "no net", "is_error": True},
                            {"type": "text", "text": "try again"},
                        ],
                    },
                ]
            }
        )
    )
    conversation = MessagesConversation(fields)

    call = {"id": "t1", "type": "function", "function": {"name": "warmth", "arguments": '{"in":"Oslo"}'}}
    assert conversation.messages == [
        {"role": "user", "content": "how warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [call],
            "reasoning_content": "I ask.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no net"},
        {"role": "user", "content": "try again"},
    ]
    assert conversation.places["messages.2"] == "messages.2.content.0"
    assert conversation.places["messages.3"] == "messages.2"
