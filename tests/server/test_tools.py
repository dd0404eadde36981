"""Tools: what a model may call, and what clients get of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.letters import error_of, events_of
from tests.server.speaker import ANSWER, Speaker, speaking

Ask = Callable[..., httpx.Response]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
HELLO = {"role": "user", "content": "Hello"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WANTED = {"name": "weather", "arguments": '{"city": "Rome"}'}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def client(speaker, tmp_path_factory) -> Iterator[httpx.Client]:
    with speaking(tmp_path_factory.mktemp("model"), speaker) as client:
        yield client


@pytest.fixture
def ask(client, speaker) -> Ask:
    def ask(says: str = "Hi", messages: Any = None, **fields: Any) -> httpx.Response:
        speaker.text = says
        asked = {"messages": messages or [HELLO], "tools": [WEATHER, CLOCK], "temperature": 0, **fields}
        return client.post("/v1/chat/completions", json=asked)

    return ask


def choice_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_a_call_has_an_id_a_name_and_arguments_and_no_content(ask):
    choice = choice_of(ask(CALL))
    (call,) = choice["message"]["tool_calls"]

    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Rome"}'})
    assert call["id"].startswith("call_")


def test_text_before_a_call_is_content_and_calls_have_different_ids(ask):
    message = choice_of(ask(f"I will look.{CALL}\n{CALL}"))["message"]

    assert message["content"] == "I will look."
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_an_answer_without_calls_is_as_if_there_were_no_tools(ask):
    choice = choice_of(ask("No <tool> is needed."))

    assert choice["message"] == {"role": "assistant", "content": "No <tool> is needed.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_cut_by_length_says_so(ask):
    choice = choice_of(ask(CALL, max_tokens=56))

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "R'


def test_a_stream_has_the_name_first_and_then_the_arguments_as_they_come(ask):
    events = events_of(ask(f"Well.{CALL}", stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    (first, *others) = [call for delta in deltas for call in delta.get("tool_calls", ())]

    assert deltas[0]["role"] == "assistant"
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert "".join(call["function"]["arguments"] for call in (first, *others)) == '{"city": "Rome"}'
    assert all(call.keys() == {"index", "function"} for call in others)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."


def test_a_stream_that_only_calls_has_no_content(ask):
    first, *_ = events_of(ask(CALL, stream=True))

    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["choices"][0]["delta"]["content"] is None


def test_tools_calls_and_results_are_rendered(ask, speaker):
    ask(messages=[HELLO, {"role": "assistant", "tool_calls": [CALLED]}, result()])
    shown = '{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}'

    assert shown in speaker.prompt
    assert speaker.prompt.endswith(
        f"user:Hello|assistant:{CALL}|user:<tool_response>\n18 degrees\n</tool_response>|{ANSWER}"
    )


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "18 degrees", "tool_call_id": "1", **fields}


def test_an_answer_goes_back_as_it_came(ask):
    message = choice_of(ask(CALL))["message"]
    answered = result(tool_call_id=message["tool_calls"][0]["id"], content=[{"type": "text", "text": "18"}])

    assert choice_of(ask("Warm.", messages=[HELLO, message, answered]))["message"]["content"] == "Warm."


def test_without_a_choice_of_tools_none_is_shown_or_read(ask, speaker):
    message = choice_of(ask(CALL, tool_choice="none"))["message"]

    assert speaker.prompt == f"user:Hello|{ANSWER}"
    assert (message["content"], message.get("tool_calls")) == (CALL, None)


def test_tools_are_not_needed_where_only_the_history_has_calls(ask, speaker):
    ask(tools=None, messages=[HELLO, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, result()])

    assert CALL in speaker.prompt


def test_the_older_form_of_calls_in_a_history_is_the_same(ask, speaker):
    called = {"role": "assistant", "content": None, "function_call": CALLED["function"]}
    ask(messages=[HELLO, called, {"role": "function", "name": "weather", "content": "18"}])

    assert f"assistant:{CALL}|user:<tool_response>\n18\n" in speaker.prompt


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (named("weather"), "stop")])
def test_a_call_that_must_be_made_has_a_grammar_and_a_reason_as_openai_gives_it(ask, speaker, choice, reason):
    answer = choice_of(ask(CALL, tool_choice=choice))

    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == (reason, 1)
    assert speaker.sampling.grammar is not None


def test_a_call_that_may_be_made_has_no_grammar(ask, speaker):
    ask(CALL, parallel_tool_calls=True)

    assert speaker.sampling.grammar is None


@pytest.mark.parametrize(("choice", "reason"), [("auto", "function_call"), ({"name": "weather"}, "stop")])
def test_the_older_form_of_tools_gets_the_older_form_of_calls(ask, choice, reason):
    old = {"tools": None, "functions": [WEATHER["function"]], "function_call": choice}
    answer = choice_of(ask(CALL, **old))
    events = [event["choices"][0] for event in events_of(ask(CALL, stream=True, **old))]
    pieces = [piece for event in events if (piece := event["delta"].get("function_call"))]

    assert answer["message"]["function_call"] == WANTED
    assert (answer["finish_reason"], events[-1]["finish_reason"]) == (reason, reason)
    assert "tool_calls" not in answer["message"]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
    assert "".join(piece["arguments"] for piece in pieces) == WANTED["arguments"]


LONG = "f" * 65


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name", "1 to 64 characters"),
        ([{"type": "function", "function": {"name": LONG}}], "tools.0.function.name", "1 to 64 characters"),
        ([{"type": "function", "function": {"name": ""}}], "tools.0.function.name", "1 to 64 characters"),
        ([{"type": "function", "function": {"name": "f<|im_end|>"}}], "tools.0.function.name", "1 to 64 characters"),
        ([CLOCK, CLOCK], "tools.1.function.name", "'clock', as tools.0.function.name is"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tools.0.type", "only 'function' is supported"),
        ([{"type": "function"}], "tools.0.function", "is missing"),
        ([{"type": "function", "function": {"name": "f", "strict": 1}}], "tools.0.function.strict", "boolean"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_name(ask, tools, param, words):
    assert_refused(ask(tools=tools), param, words)


@pytest.mark.parametrize(
    ("parameters", "place", "words"),
    [
        ([], "", "an object"),
        ("object", "", "an object"),
        ({"type": "string"}, ".type", "must be 'object'"),
        ({"properties": ["city"]}, ".properties", "a schema for each name"),
        ({"properties": {"city": "string"}}, ".properties", "a schema for each name"),
        ({"required": "city"}, ".required", "a list of names"),
    ],
)
def test_parameters_that_are_no_schema_are_refused_with_their_place(ask, parameters, place, words):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    assert_refused(ask(tools=[CLOCK, tool]), f"tools.1.function.parameters{place}", words)


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([HELLO, result()], "messages.1.tool_call_id", "'1', but no message before it makes that call"),
        ([result(), {"role": "assistant", "tool_calls": [CALLED]}], "messages.0.tool_call_id", "no message before it"),
        ([HELLO, result(tool_call_id=None)], "messages.1.tool_call_id", "is missing"),
        ([HELLO, {"role": "function", "name": "f", "content": "x"}], "messages.1.name", "no message before it"),
        ([{"role": "user", "content": "x", "tool_calls": [CALLED]}], "messages.0.tool_calls", "of the assistant"),
        ([{"role": "assistant"}], "messages.0.content", "only a message with tool_calls may have none"),
        (
            [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
            "must be the text of a JSON object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "[" * 10**5}}]}],
            "messages.0.tool_calls.0.function.arguments",
            "must be the text of a JSON object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f g", "arguments": "{}"}}]}],
            "messages.0.tool_calls.0.function.name",
            "1 to 64 characters",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.id", "is missing"),
    ],
)
def test_a_history_that_does_not_hold_together_is_refused_with_its_place(ask, messages, param, words):
    assert_refused(ask(messages=messages), param, words)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "moon"}}}, "tool_choice.function.name", "'moon'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        ({"tool_choice": "never"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "the request has no tools"),
        ({"functions": [CLOCK["function"]]}, "functions", "older name of tools"),
        ({"tools": None, "functions": [{"name": "a b"}]}, "functions.0.name", "1 to 64 characters"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused_by_name(ask, fields, param, words):
    assert_refused(ask(**fields), param, words)


def assert_refused(response: httpx.Response, param: str | None, words: str) -> None:
    error = error_of(response)

    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_server_that_reads_no_calls_refuses_tools(tmp_path):
    with speaking(tmp_path, Speaker(), tool_call_parser="none") as client:
        refused = client.post("/v1/chat/completions", json={"messages": [HELLO], "tools": [CLOCK]})

    assert_refused(refused, "tools", "--tool-call-parser none")


def test_a_format_is_read_though_it_begins_with_a_special_token(tmp_path):
    knows = "{% if tools or messages[0].role == 'tool' %}[TOOL_CALLS]{% endif %}" + ANSWER
    speaker = Speaker(knows, special=["[TOOL_CALLS]"])
    speaker.text = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    with speaking(tmp_path, speaker) as client:
        choice = choice_of(client.post("/v1/chat/completions", json={"messages": [HELLO], "tools": [CLOCK]}))

    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
