"""The `openai` package, as people use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from rota.server.access.keys import Key, KeyRing, digest_of
from tests.server.letters import CONTEXT, letters_device, serving
from tests.server.speaker import Speaker, speaking
from tests.waiting import TIMEOUT_S

MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def device():
    return letters_device()


@pytest.fixture(scope="module")
def server(device, tmp_path_factory) -> Iterator[httpx.Client]:
    keys = KeyRing(
        {
            digest_of("sk-all"): Key("all"),
            digest_of("sk-acme"): Key("acme", frozenset({"pirate"}), may_use_base=False, requests_per_minute=2),
        }
    )
    folder = tmp_path_factory.mktemp("model")
    with serving(folder, device, keys=keys, adapters=("pirate", "poet")) as client:
        yield client


def client_of(server: httpx.Client, key: str = "sk-all") -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def client(server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def test_it_chats(client):
    answer = client.chat.completions.create(
        model="pirate", messages=MESSAGES, max_completion_tokens=3, temperature=0, logprobs=True, top_logprobs=1, seed=5
    )

    assert answer.model == "pirate"
    assert answer.choices[0].message.content == "def"
    assert answer.choices[0].finish_reason == "length"
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["d", "e", "f"]
    assert answer.usage.total_tokens == 6


def test_it_goes_on_with_a_conversation(client):
    first = client.chat.completions.create(model="letters", messages=MESSAGES, max_tokens=2).choices[0].message
    second = client.chat.completions.create(model="letters", messages=[*MESSAGES, first, *MESSAGES], max_tokens=2)

    assert second.usage.prompt_tokens == len("ab|de|ab|")


def test_it_streams_a_chat(client):
    stream = client.chat.completions.create(
        model="letters", messages=MESSAGES, max_tokens=4, n=2, stream=True, stream_options={"include_usage": True}
    )
    said = {0: "", 1: ""}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""

    assert said == {0: "defg", 1: "defg"}
    assert usage.completion_tokens == 8


def test_it_collects_a_stream_with_its_own_helper(client):
    with client.chat.completions.stream(model="letters", messages=MESSAGES, stop="h") as stream:
        final = stream.get_final_completion()

    assert (final.choices[0].message.content, final.choices[0].message.role) == ("defg", "assistant")


def test_it_completes(client):
    answer = client.completions.create(model="letters", prompt=["ab", "a"], max_tokens=2, echo=True, stop=["z"])

    assert [choice.text for choice in answer.choices] == ["abcd", "abc"]


def test_it_streams_a_completion(client):
    stream = client.completions.create(model="letters", prompt="abc", max_tokens=4, stream=True, logprobs=2)

    assert "".join(chunk.choices[0].text for chunk in stream) == "defg"


def test_it_sends_other_servers_fields_along(client):
    extra = {"ignore_eos": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    answer = client.completions.create(model="letters", prompt="the end", max_tokens=3, extra_body=extra)

    assert answer.usage.completion_tokens == 3


def test_it_lists_models(client):
    assert [model.id for model in client.models.list()] == ["letters", "pirate", "poet"]
    assert client.models.retrieve("pirate").parent == "letters"


def test_many_at_once_get_their_own_answers(server):
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="sk-all", timeout=TIMEOUT_S) as client:
            asked = [client.completions.create(model="letters", prompt="x" * n, max_tokens=2) for n in range(1, 33)]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    letters = "abcdefghijklmnopqrstuvwxyz" * 3
    assert asyncio.run(ask_all()) == [letters[n : n + 2] for n in range(1, 33)]


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, openai.BadRequestError, "tools.0.type"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, openai.APIStatusError, "messages"),
    ],
)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_errors_are_raised_as_what_they_are(client, fields, error, param, is_streamed):
    asked = {"model": "letters", "messages": MESSAGES, "stream": is_streamed, **fields}
    with pytest.raises(error) as raised:
        client.chat.completions.create(**asked)

    assert raised.value.param == param


def test_a_wrong_key_a_foreign_adapter_and_too_many_requests_are_raised_as_such(server):
    with pytest.raises(openai.AuthenticationError), client_of(server, "sk-wrong") as client:
        client.models.list()
    with client_of(server, "sk-acme") as client:
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(model="poet", prompt="a")
        client.completions.create(model="pirate", prompt="a", max_tokens=1)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="pirate", prompt="a", max_tokens=1)


# ── tools ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

QUESTION = [{"role": "user", "content": "Is it warm?"}]
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
def caller(speaker, tmp_path_factory) -> Iterator[OpenAI]:
    with (
        speaking(tmp_path_factory.mktemp("model"), speaker) as server,
        OpenAI(base_url=f"{server.base_url}/v1", api_key="x", max_retries=0, timeout=TIMEOUT_S) as caller,
    ):
        yield caller


def test_it_goes_through_a_call_and_its_result(caller, speaker):
    speaker.text = CALL
    asked = caller.chat.completions.create(model="speaker", messages=QUESTION, tools=[WEATHER]).choices[0].message
    (call,) = asked.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    speaker.text = "Quite warm."
    answer = caller.chat.completions.create(model="speaker", messages=[*QUESTION, asked, told], tools=[WEATHER])

    assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("Quite warm.", None)
    assert "<tool_response>\n18 degrees\n</tool_response>" in speaker.prompt


def test_it_parses_arguments_into_a_model(caller, speaker):
    speaker.text = CALL
    answer = caller.chat.completions.parse(model="speaker", messages=QUESTION, tools=[WEATHER])

    message = answer.choices[0].message
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"}

    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Rome", days=2)
    assert caller.chat.completions.create(model="speaker", messages=[*QUESTION, message, told]).choices


def test_its_stream_helper_tells_of_arguments_as_they_come(caller, speaker):
    speaker.text = f"I will look.{CALL}\n{CALL}"
    with caller.chat.completions.stream(model="speaker", messages=QUESTION, tools=[WEATHER]) as stream:
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


def test_it_streams_deltas_that_can_be_put_together_by_index(caller, speaker):
    speaker.text = f"{CALL}{CALL}"
    calls: dict[int, dict[str, str]] = {}
    for chunk in caller.chat.completions.create(model="speaker", messages=QUESTION, tools=[WEATHER], stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id or "", "name": piece.function.name or "", "text": ""})
            call["text"] += piece.function.arguments or ""

    assert [json.loads(call["text"])["city"] for call in calls.values()] == ["Rome", "Rome"]
    assert all(call["id"] and call["name"] == "Weather" for call in calls.values())


def test_a_tool_without_a_schema_of_arguments_is_raised_as_a_bad_request(caller):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        caller.chat.completions.create(model="speaker", messages=QUESTION, tools=[tool])

    assert raised.value.param == "tools.0.function.parameters.type"
