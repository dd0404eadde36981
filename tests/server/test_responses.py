"""/v1/responses, as the `openai` package and others ask it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from rota.server.answers.blocks import AnswerBlocks
from rota.server.responses.writer import Output
from tests.server.letters import CONTEXT, error_of, serving
from tests.server.speaker import call_of, deltas_of, named_events_of, prompt_of
from tests.waiting import TIMEOUT_S


@pytest.fixture(scope="module")
def server(device, tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), device, adapters=("pirate",)) as client:
        yield client


@pytest.fixture(scope="module")
def client(server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def ask(server: httpx.Client, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", json={"input": "ab", "temperature": 0, **fields})


def test_a_text_is_answered(client, device):
    answer = client.responses.create(
        model="pirate", input="ab", instructions="xy", max_output_tokens=3, metadata={"for": "me"}
    )

    assert prompt_of(device) == "xy|ab|"
    assert answer.output_text == "ghi"
    assert (answer.model, answer.status, answer.incomplete_details.reason) == (
        "pirate",
        "incomplete",
        "max_output_tokens",
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (6, 3, 9)
    assert (answer.store, answer.metadata, answer.instructions) == (False, {"for": "me"}, "xy")


def test_an_answer_that_ends_by_itself_is_complete_and_goes_on_as_input(client, device):
    first = client.responses.create(model="letters", input="ab", extra_body={"stop": ["f"]})
    items = [{"role": "user", "content": "ab"}, *first.output, {"role": "user", "content": "c"}]
    client.responses.create(model="letters", input=items, max_output_tokens=1)

    assert (first.status, first.output[0].status, first.output_text) == ("completed", "completed", "de")
    assert prompt_of(device) == "ab|de|c|"


def test_a_stream_says_every_step_in_order_and_counts(server):
    events = named_events_of(ask(server, max_output_tokens=3, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [kind for kind in dict.fromkeys(kinds)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == "def"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "def"


def test_the_clients_own_stream_helper_collects_an_answer(client):
    with client.responses.stream(model="letters", input="ab", extra_body={"stop": ["g"]}) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert (texts[-1], final.output_text, final.status) == ("def", "def", "completed")


def test_log_probabilities_come_when_they_are_included(client):
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
    answer = client.responses.create(model="letters", input="ab", **wanted)
    stream = client.responses.create(model="letters", input="ab", stream=True, **wanted)
    streamed = [one for event in stream if event.type == "response.output_text.delta" for one in event.logprobs]

    logprobs = answer.output[0].content[0].logprobs
    assert [one.token for one in logprobs] == ["d", "e"] == [one.token for one in streamed]
    assert len(logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "store"),
        ({"background": True}, "background", "store"),
        ({"truncation": "auto"}, "truncation", "context"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "web_search"),
        ({"tools": [{"type": "function", "name": "f", "colour": 1}]}, "tools.0.colour", "not a field of a function"),
        ({"include": ["file_search_call.results"]}, "include.0", "file_search_call.results"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_image"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content", "text"),
        ({"input": []}, "input", "at least one"),
        ({"input": 3}, "input", "a text or a list"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "between"),
        ({"colour": "red"}, "colour", "not a field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_own_name(server, fields, param, word):
    response = ask(server, **fields)

    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert word in error_of(response)["message"]


def test_a_number_without_end_is_refused_and_not_left_out(server):
    response = server.post("/v1/responses", content=b'{"input": "ab", "temperature": Infinity}')

    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")


def test_a_conversation_longer_than_the_context_is_400(server):
    response = ask(server, input="x" * CONTEXT)

    assert (response.status_code, error_of(response)["param"]) == (400, "input")


def heard(*texts: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The kinds of events, and the items, of what a model says a step at a time."""
    blocks, output = AnswerBlocks(), Output("resp_x")
    events = [
        event
        for delta in deltas_of(*texts)
        for change in blocks.hear(delta)
        for event in output.events(change, "completed")
    ]
    kinds = [kind.removeprefix("response.") for kind, _ in events]
    return kinds, [fields["item"] for kind, fields in events if kind.endswith("output_item.done")]


def test_thoughts_text_and_calls_become_items_one_after_another():
    calls = call_of("f", '{"a": 1}'), call_of("g", "{}")
    kinds, items = heard("<think>h", "mm</think>", "I look.", *calls)

    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert items[1]["content"][0]["text"] == "I look."
    assert [(item["name"], json.loads(item["arguments"])) for item in items[2:]] == [("f", {"a": 1}), ("g", {})]
    assert kinds[:6] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ]
    assert kinds[-2:] == ["function_call_arguments.done", "output_item.done"]


def test_an_answer_without_a_character_is_an_empty_text():
    _, items = heard("")

    assert [item["content"][0]["text"] for item in items] == [""]
