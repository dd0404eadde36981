"""The `openai` package with tools, as people use it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.speaker import Speaker, speaking
from tests.waiting import TIMEOUT_S

MESSAGES = [{"role": "user", "content": "Is it warm?"}]
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


WEATHER = openai.pydantic_function_tool(Weather)


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def client(speaker, tmp_path_factory) -> Iterator[OpenAI]:
    with (
        speaking(tmp_path_factory.mktemp("model"), speaker) as server,
        OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0, timeout=TIMEOUT_S) as client,
    ):
        yield client


def test_it_goes_through_a_call_and_its_result(client, speaker):
    speaker.text = CALL
    asked = client.chat.completions.create(model="speaker", messages=MESSAGES, tools=[WEATHER]).choices[0].message
    (call,) = asked.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    speaker.text = "Quite warm."
    answer = client.chat.completions.create(model="speaker", messages=[*MESSAGES, asked, told], tools=[WEATHER])

    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("Quite warm.", None)
    assert "<tool_response>\n18 degrees\n</tool_response>" in speaker.prompt


def test_it_parses_arguments_into_a_model(client, speaker):
    speaker.text = CALL
    answer = client.chat.completions.parse(model="speaker", messages=MESSAGES, tools=[WEATHER])

    message = answer.choices[0].message
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"}

    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=2)
    assert client.chat.completions.create(model="speaker", messages=[*MESSAGES, message, told]).choices


def test_its_stream_helper_tells_of_arguments_as_they_come(client, speaker):
    speaker.text = f"I will look.{CALL}\n{CALL}"
    with client.chat.completions.stream(model="speaker", messages=MESSAGES, tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]

    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "Weather", Weather(city="Rome", days=2)),
        (1, "Weather", Weather(city="Rome", days=2)),
    ]
    assert "".join(event.arguments_delta for event in pieces if event.index == 1) == done[1].arguments
    assert (final.message.content, final.finish_reason) == ("I will look.", "tool_calls")


def test_it_streams_deltas_that_can_be_put_together_by_index(client, speaker):
    speaker.text = f"{CALL}{CALL}"
    calls: dict[int, dict[str, str]] = {}
    for chunk in client.chat.completions.create(model="speaker", messages=MESSAGES, tools=[WEATHER], stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id or "", "name": piece.function.name or "", "text": ""})
            call["text"] += piece.function.arguments or ""

    assert [json.loads(call["text"])["city"] for call in calls.values()] == ["Rome", "Rome"]
    assert all(call["id"] and call["name"] == "Weather" for call in calls.values())


def test_a_tool_without_a_schema_of_arguments_is_raised_as_a_bad_request(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="speaker", messages=MESSAGES, tools=[tool])

    assert raised.value.param == "tools.0.function.parameters.type"
