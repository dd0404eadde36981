from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.letters import CONTEXT, error_of, events_of, serving, steps_made
from tests.server.speaker import prompt_of

Ask = Callable[..., httpx.Response]
HELLO = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def client(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, adapters=("pirate", "poet")) as client:
        yield client


@pytest.fixture
def ask(client) -> Ask:
    def ask(messages: Any = HELLO, **fields: Any) -> httpx.Response:
        return client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    return ask


def test_a_conversation_is_rendered_by_the_models_template_and_continued(ask, device):
    body = ask([{"role": "system", "content": "x"}, *HELLO], max_tokens=3).json()

    assert prompt_of(device) == "x|ab|"
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "fgh", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 3)


def test_a_stream_says_the_role_first_and_the_reason_last(ask):
    events = events_of(ask(max_tokens=4, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]

    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.get("content", "") for delta in deltas) == "defg"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


def test_each_of_many_choices_says_its_role_once(ask):
    events = events_of(ask(max_tokens=2, n=3, stream=True))
    roles = [event["choices"][0]["index"] for event in events if event["choices"][0]["delta"].get("role")]

    assert sorted(roles) == [0, 1, 2]


def test_a_stream_tells_its_usage_when_asked(ask):
    *_, last = events_of(ask(max_tokens=4, stream=True, stream_options={"include_usage": True}))

    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


@pytest.mark.parametrize(
    ("fields", "length"), [({"max_completion_tokens": 2}, 2), ({"max_tokens": 2}, 2), ({}, CONTEXT - 3)]
)
def test_an_answer_may_be_as_long_as_asked_or_as_the_context(ask, fields, length):
    assert ask(**fields).json()["usage"]["completion_tokens"] == length


def test_content_may_come_in_parts_and_developers_speak_as_the_system(ask, device):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}], max_tokens=1)

    assert prompt_of(device) == "x|a\nb|"


def test_an_answer_of_ours_may_be_sent_back_as_clients_do(ask, device):
    said = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    assert ask([*HELLO, said, *HELLO], max_tokens=1).status_code == 200

    assert prompt_of(device) == "ab|c|ab|"


@pytest.mark.parametrize(
    "names", [{"model": "pirate"}, {"model": "letters:pirate"}, {"model": "letters", "lora_path": "pirate"}]
)
def test_an_adapter_answers_to_its_name(ask, device, names):
    body = ask(**names, max_tokens=1).json()

    assert body["model"] == "pirate"
    assert [seat.adapter_id for plan in device.plans for seat in plan.seats][-1] == 1


@pytest.mark.parametrize(
    ("names", "status", "param"),
    [
        ({"model": "pirate", "lora_path": "letters"}, 400, "lora_path"),
        ({"model": "pirate", "lora_path": "poet"}, 400, "lora_path"),
        ({"lora_path": "nobody"}, 404, "lora_path"),
        ({"model": "letters", "lora_path": "nobody"}, 404, "lora_path"),
        ({"model": "gpt-9", "lora_path": "pirate"}, 404, "model"),
    ],
)
def test_names_that_do_not_go_together_or_mean_nobody_are_refused(ask, names, status, param):
    refused = ask(**names, max_tokens=1)
    words = "two different adapters" if status == 400 else "; known are: letters, pirate, poet."

    assert (refused.status_code, error_of(refused)["param"]) == (status, param)
    assert words in error_of(refused)["message"]


def test_logprobs_come_in_the_shape_of_chats(ask):
    logprobs = ask(max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]

    assert logprobs == {
        "content": [
            {
                "token": "d",
                "logprob": -0.5,
                "bytes": [100],
                "top_logprobs": [
                    {"token": "d", "logprob": -0.5, "bytes": [100]},
                    {"token": "e", "logprob": -1.5, "bytes": [101]},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_streams_logprobs_come_with_its_tokens(ask):
    events = events_of(ask(max_tokens=3, logprobs=True, stream=True))
    tokens = [entry["token"] for event in events for entry in event["choices"][0]["logprobs"]["content"]]

    assert tokens == ["d", "e", "f"]


def test_a_stop_string_ends_a_message(ask):
    choice = ask(stop=["gh"], max_tokens=50).json()["choices"][0]

    assert (choice["message"]["content"], choice["finish_reason"]) == ("def", "stop")


def test_fields_that_change_nothing_are_taken(ask):
    harmless = {
        "user": "me",
        "metadata": {"team": "blue"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "functions": None,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "modalities": ["text"],
        "audio": None,
        "safety_identifier": "u1",
        "prompt_cache_key": "k1",
        "reasoning_effort": None,
        "min_tokens": 0,
    }
    assert ask(max_tokens=1, **harmless).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "messages should have at least 1 item"),
        ({"messages": None}, "messages", "messages should be a valid array"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "should be 'system', 'developer'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role is missing"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content is missing"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "must be a text or a list of text parts",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "'messages.0.mood' is not a"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "is of type 'image_url'; only 'text' is supported",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
            "messages.0.tool_calls.0.function is missing",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is missing"),
        ({"tool_choice": "required"}, "tool_choice", "asks for a call, but the request has no tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type should be 'text', "),
        ({"modalities": ["audio"]}, "modalities.0", "modalities.0 should be 'text'"),
        ({"echo": True}, "echo", "does not support echo"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be between 0 and 20"),
        ({"logprobs": 2}, "logprobs", "logprobs should be a valid boolean"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "disagree; send one of them"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "may have none"),
        ({"prompt": "x"}, "prompt", "'prompt' is not a field; the fields are"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(ask, client, device, fields, param, words):
    before = steps_made(client, device)
    response = ask(**fields)

    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert len(device.plans) == before


@pytest.mark.parametrize("length", [CONTEXT, 300 * CONTEXT])
def test_a_conversation_longer_than_the_context_is_400_whether_it_is_tokenized_or_not(ask, length):
    response = ask([{"role": "user", "content": "x" * length}])

    assert (response.status_code, error_of(response)["param"]) == (400, "messages")
