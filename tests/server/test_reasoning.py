"""Thoughts come apart from the answer, and the client says whether there are any."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.server.letters import error_of, events_of
from tests.server.speaker import ANSWER, Speaker, speaking
from tests.waiting import TIMEOUT_S

Ask = Callable[..., httpx.Response]

# As Qwen3's: the model opens its thoughts itself, unless the template has closed them.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ message.reasoning_content }}|{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}" + ANSWER
)
# As gpt-oss's: the template reads how long to think.
EFFORT = "{{ messages[0].content }}, {{ reasoning_effort }}" + ANSWER
HELLO = {"role": "user", "content": "Hello"}
SAYS = "<think>\nSo.\n</think>\n\nYes."


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(TEMPLATE)


@pytest.fixture(scope="module")
def client(speaker, tmp_path_factory) -> Iterator[httpx.Client]:
    with speaking(tmp_path_factory.mktemp("model"), speaker) as client:
        yield client


@pytest.fixture
def ask(client, speaker) -> Ask:
    def ask(says: str = SAYS, **fields: Any) -> httpx.Response:
        speaker.text = says
        return client.post("/v1/chat/completions", json={"messages": [HELLO], "temperature": 0, **fields})

    return ask


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def test_thoughts_have_a_field_of_their_own_under_both_names(ask):
    message = message_of(ask())

    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", "So.", "So.")


def test_a_stream_has_the_thoughts_first(ask):
    deltas = [event["choices"][0]["delta"] for event in events_of(ask(stream=True))]
    kinds = [kind for delta in deltas for kind in ("reasoning", "content") if delta.get(kind)]

    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "So."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert kinds == sorted(kinds, reverse=True)


def test_an_answer_without_thoughts_has_no_field_for_them(ask):
    assert message_of(ask("Yes.")) == {"role": "assistant", "content": "Yes.", "refusal": None}


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({"include_reasoning": False}, "Yes.", None),
        ({"separate_reasoning": False}, SAYS, None),
        ({"include_reasoning": True, "separate_reasoning": True}, "Yes.", "So."),
    ],
)
def test_clients_say_where_thoughts_go(ask, fields, content, reasoning):
    message = message_of(ask(**fields))

    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False, "mood": 1}}, {"reasoning_effort": "none"}]
)
def test_the_template_is_told_not_to_think(ask, speaker, fields):
    assert message_of(ask("Yes.", **fields))["content"] == "Yes."
    assert speaker.prompt == f"Hello|<think>\n\n</think>\n\n{ANSWER}"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_of_the_history_go_to_the_template(ask, speaker, name):
    ask(messages=[HELLO, {"role": "assistant", "content": "Yes.", name: "So."}, HELLO])

    assert speaker.prompt == f"Hello|Yes.So.|Hello|{ANSWER}"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort", "should be 'none', 'minimal'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "sets what Rota itself gives"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token", "sets what Rota itself gives"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "sets what Rota"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ],
)
def test_what_the_template_cannot_be_told_is_refused(ask, fields, param, words):
    response = ask(**fields)

    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert words in error_of(response)["message"]


def test_an_effort_goes_to_a_template_that_reads_it(tmp_path):
    speaker = Speaker(EFFORT)
    with speaking(tmp_path, speaker) as client:
        client.post("/v1/chat/completions", json={"messages": [HELLO], "reasoning_effort": "low"})

    assert speaker.prompt == f"Hello, low{ANSWER}"


@pytest.mark.parametrize("is_special", [True, False])
def test_thoughts_that_the_prompt_opens_are_thoughts_from_the_first_token(tmp_path, is_special):
    marks = ["<think>", "</think>"] if is_special else []
    speaker = Speaker("{{ messages[0].content }}" + ANSWER + "<think>", special=marks)
    speaker.text = "So.\n</think>\n\nYes."
    speaker.skipped = 1 if is_special else len("<think>")
    with speaking(tmp_path, speaker) as client:
        message = message_of(client.post("/v1/chat/completions", json={"messages": [HELLO]}))

    assert (message["reasoning"], message["content"]) == ("So.", "Yes.")


def test_a_stream_whose_thoughts_are_left_out_shows_that_it_is_alive(tmp_path):
    speaker, has_heard = Speaker(TEMPLATE), threading.Event()
    says = speaker.device.next_token

    def says_in_two_parts(tokens: Sequence[int]) -> int:
        assert len(tokens) < 40 or has_heard.wait(TIMEOUT_S)
        return says(tokens)

    speaker.device.next_token = says_in_two_parts
    speaker.text = f"<think>{'So. ' * 15}</think>Yes."
    fields = {"messages": [HELLO], "include_reasoning": False, "stream": True}
    with (
        speaking(tmp_path, speaker, stream_keep_alive=0.1) as client,
        client.stream("POST", "/v1/chat/completions", json=fields) as stream,
    ):
        lines = stream.iter_lines()
        silence = next(lines)
        has_heard.set()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    assert silence == ""
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Yes."


def test_a_server_told_to_read_no_thoughts_leaves_them_in_the_content(tmp_path):
    speaker = Speaker(TEMPLATE)
    speaker.text = SAYS
    with speaking(tmp_path, speaker, reasoning_parser="none") as client:
        assert message_of(client.post("/v1/chat/completions", json={"messages": [HELLO]}))["content"] == SAYS
