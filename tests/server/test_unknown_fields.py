"""Fields that no body has are ignored if they change no answer, and the answer names them; others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rota.core.config import ServerConfig
from rota.server.calls.known_fields import ADVICE, IGNORABLE
from tests.server.letters import error_of, letters_device, serving
from tests.server.speaker import ANSWER, Speaker, speaking

HELLO = [{"role": "user", "content": "ab"}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, OLLAMA, GENERATE = "/v1/responses", "/api/chat", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    COMPLETIONS: {"prompt": "ab", "max_tokens": 2},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    RESPONSES: {"input": "ab", "max_output_tokens": 2},
    OLLAMA: {"messages": HELLO, "stream": False, "options": {"num_predict": 2}},
    GENERATE: {"text": "ab", "sampling_params": {"max_new_tokens": 2}},
}
WITH_ID = [{"role": "user", "content": "ab", "id": "m1"}, {"role": "user", "content": "a", "id": "m2"}]
HEADER = "x-rota-ignored-fields"


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[httpx.Client]:
    with serving(tmp_path_factory.mktemp("model"), letters_device()) as client:
        yield client


@pytest.fixture(scope="module", params=["refuse", "ignore"])
def other(request, tmp_path_factory) -> Iterator[httpx.Client]:
    config = ServerConfig(unknown_fields=request.param)
    with serving(tmp_path_factory.mktemp("model"), letters_device(), config) as client:
        client.headers["x-mode"] = request.param
        yield client


def ask(client: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    return client.post(path, json=BODIES[path] | fields)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"metadata": {"user_id": "a"}}, "metadata"),
        ({"store": True, "verbosity": "low", "service_tier": "flex"}, "store, verbosity, service_tier"),
        (
            {"top_a": 0, "mirostat": 0, "mirostat_tau": 5.0, "repeat_last_n": 64, "typical_p": 1.0},
            "mirostat_tau, repeat_last_n, typical_p",
        ),
    ],
)
def test_what_changes_no_answer_is_ignored_and_named(client, path, fields, named):
    plain, answer = ask(client, path, {}), ask(client, path, fields)
    known = {MESSAGES: {"metadata"}, RESPONSES: {"metadata", "store"}}.get(path, set())

    assert answer.status_code == 200, answer.text
    expected = set(named.split(", ")) - known
    assert set(answer.headers.get(HEADER, "").split(", ")) - {""} == expected
    assert HEADER not in plain.headers


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"messages": WITH_ID}, "messages.0.id"),
        (CHAT, {"messages": [WITH_ID[0] | {"images": [], "annotations": []}]}, "messages.0.id"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        (CHAT, {"reasoning_effort": "high", "enable_thinking": False}, "reasoning_effort, enable_thinking"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        (CHAT, {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
        (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction"),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "top_p": 1.0, "presence_penalty": 0}, "thinking"),
        (MESSAGES, {"messages": WITH_ID, "output_config": {"effort": "max"}}, "messages.0.id, output_config.effort"),
        (RESPONSES, {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}}, "text.verbosity, reasoning.effort"),
        (OLLAMA, {"think": False, "options": {"num_gpu": 1, "num_predict": 1}}, "options.num_gpu, think"),
        (OLLAMA, {"messages": WITH_ID}, "messages.0.id"),
        (GENERATE, {"sampling_params": {"typical_p": 1.0}}, "sampling_params.typical_p"),
        (GENERATE, {"text": ["a"] * 2, "sampling_params": [{"typical_p": 1.0}] * 2}, "sampling_params.0.typical_p"),
    ],
)
def test_a_field_that_is_ignored_has_the_clients_name_for_it(client, path, fields, named):
    answer = ask(client, path, fields)

    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == named


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"colour": 1}, "colour", "'colour' is not a field"),
        ({"metadata": {}, "tempratur": 0}, "tempratur", "'tempratur' is not a field"),
        ({"top_a": 0.5}, "top_a", "Rota does not support top_a other than 0"),
        ({"mirostat": 2}, "mirostat", "Rota does not support mirostat other than 0"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(client, path, fields, param, words):
    answer = ask(client, path, fields)

    assert answer.status_code == 400
    assert words in answer.text
    assert path in (MESSAGES, OLLAMA) or error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("fields", "refused_by"),
    [
        ({"colour": 1}, {"refuse"}),
        ({"store": True}, {"refuse"}),
        ({"store": False, "metadata": {}, "messages": [HELLO[0] | {"annotations": []}]}, set()),
        ({"messages": [HELLO[0] | {"colour": 1}]}, {"refuse"}),
        ({"reasoning_effort": "low"}, {"refuse"}),
        ({"top_a": 0.5}, {"refuse", "ignore"}),
        ({"suffix": "x"}, {"refuse", "ignore"}),
        ({"use_beam_search": True}, {"refuse", "ignore"}),
        ({"temperature": -1, "colour": 1}, {"refuse", "ignore"}),
    ],
)
def test_an_operator_has_all_unknown_fields_refused_or_ignored(other, fields, refused_by):
    answer = ask(other, CHAT, fields)

    assert (answer.status_code == 400) == (other.headers["x-mode"] in refused_by), answer.text


def test_a_name_that_no_header_can_hold_is_told_in_characters_that_it_can(tmp_path):
    with serving(tmp_path, letters_device(), ServerConfig(unknown_fields="ignore")) as client:
        answer = ask(client, CHAT, {"a\r\nx-evil: 1é": 1, "b" * 100: 1} | {f"c{index}": 1 for index in range(99)})

    names = answer.headers[HEADER].split(", ")
    assert (names[0], len(names), max(map(len, names))) == ("a??x-evil??1?", 32, 64)
    assert "x-evil" not in answer.headers


def test_a_large_body_is_read_the_same_way_in_another_process(client):
    messages = [{"role": "user", "content": "a", "id": "m"}] * 70
    answer = ask(client, CHAT, {"messages": messages, "colour": 1})
    assert error_of(answer)["param"] == "colour"

    answer = ask(client, CHAT, {"messages": messages, "store": True})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "store, messages.0.id")


@pytest.mark.parametrize(
    ("path", "fields", "read"),
    [
        (CHAT, {"enable_thinking": False}, "False"),
        (CHAT, {"thinking": {"type": "disabled"}}, "False"),
        (CHAT, {"thinking": True}, "True"),
        (CHAT, {"reasoning_effort": "none"}, "False"),
        (CHAT, {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "False"),
        (OLLAMA, {"think": True}, "True"),
    ],
)
@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_what_a_template_reads_is_handed_to_it(tmp_path, path, fields, read, variable):
    if "chat_template_kwargs" in fields:
        fields = fields | {"chat_template_kwargs": {variable: False}}
    speaker = Speaker("{{ messages[0].content }}, {{ " + variable + " }}" + ANSWER)
    with speaking(tmp_path, speaker) as client:
        answer = ask(client, path, fields)

    assert speaker.prompt == f"ab, {read}{ANSWER}"
    assert HEADER not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/abort_request", {"rid": "a"}),
        ("/v1/tokenize", {"prompt": "a"}),
    ],
)
def test_other_routes_ignore_nothing(client, path, body):
    assert "'metadata' is not a field" in client.post(path, json=body | {"metadata": {"a": 1}}).text


def test_the_table_names_each_field_once_and_has_no_advice_for_it():
    names = [name for one in IGNORABLE for name in one.names.split()]

    assert len(names) == len(set(names))
    assert {name for one in IGNORABLE if one.values is None for name in one.names.split()}.isdisjoint(ADVICE)
